//! Token ids in a msgpack event batch, packed.
//!
//! Strategy. As in `prompt`: one scan over the batch finds the `token_ids` of its events and writes the batch anew with
//! each plain array of them as one extension value of packed little-endian u32, so that decoding makes no Python object
//! per token. Everything else is copied as it is, for the ordinary decoder to judge. Where a batch is out of the
//! ordinary (extension values of its own, tokens past 32 bits, anything malformed) the answer is None.

//!
//! Most batches say nothing but which plain blocks came and went. `plain` reads those whole: no extra keys, adapters,
//! salts, look-ahead or windows, nothing nested, nothing malformed. Of any other the answer is None, so what is odd has
//! one reader, in proto/events.py.

const TOKEN_KEY: &[u8] = b"token_ids";
const STORED: &[u8] = b"BlockStored";
const REMOVED: &[u8] = b"BlockRemoved";
const CLEARED: &[u8] = b"AllBlocksCleared";
/// Position of the token ids in an event of the array form: tag, hashes, parent, tokens.
const TOKEN_FIELD: usize = 3;
pub const EXTENSION: u8 = 84;

/// The batch with packed tokens; None where there is nothing to pack, or it must be decoded as it is.
pub fn pack(batch: &[u8]) -> Option<Vec<u8>> {
    let mut scan = Scan { data: batch, at: 0 };
    let mut out = Vec::with_capacity(batch.len());
    let mut copied = 0;
    let fields = scan.array()?;
    if fields < 2 {
        return None;
    }
    scan.skip()?;
    for _ in 0..scan.array()? {
        if let Some(fields) = scan.peek_array() {
            scan.array()?;
            let stored = fields > TOKEN_FIELD && scan.text() == Some(STORED);
            for field in 0..fields {
                if stored && field == TOKEN_FIELD {
                    copied = scan.pack_tokens(&mut out, copied)?;
                } else {
                    scan.skip()?;
                }
            }
        } else {
            for _ in 0..scan.map()? {
                let key = scan.text();
                scan.skip()?;
                if key == Some(TOKEN_KEY) {
                    copied = scan.pack_tokens(&mut out, copied)?;
                } else {
                    scan.skip()?;
                }
            }
        }
    }
    for _ in 2..fields {
        scan.skip()?;
    }
    if scan.at != batch.len() || copied == 0 {
        return None;
    }
    out.extend_from_slice(&batch[copied..]);
    Some(out)
}

pub struct Batch<'a> {
    pub ts: f64,
    pub rank: Option<u32>,
    pub events: Vec<Event<'a>>,
}

pub enum Event<'a> {
    Stored {
        hashes: Vec<u64>,
        parent: Option<u64>,
        tokens: Vec<u8>,
        block_size: u32,
        medium: Option<&'a str>,
        group: u32,
        kind: Option<&'a str>,
    },
    Removed {
        hashes: Vec<u64>,
        medium: Option<&'a str>,
        group: u32,
    },
    Cleared,
}

/// `MAX_GROUPS` and `MAX_RANK` of proto/events.py.
const MAX_GROUPS: u64 = 64;
const MAX_RANK: u64 = 65_535;

/// The fields of the array forms, after the tag, and of the map forms.
const STORED_FIELDS: [&[u8]; 11] = [
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
    b"kv_cache_spec_sliding_window",
];
const REMOVED_FIELDS: [&[u8]; 3] = [b"block_hashes", b"medium", b"group_idx"];
/// Further fields that change what an event means.
const TELLING: [&[u8]; 4] = [b"cache_salt", b"lookahead_token_ids", b"locality", b"session_id"];

/// A batch of plain events; None for any other.
pub fn plain(batch: &[u8]) -> Option<Batch<'_>> {
    let mut scan = Scan { data: batch, at: 0 };
    let fields = scan.array()?;
    if fields < 2 {
        return None;
    }
    let ts = scan.real()?;
    let count = scan.array()?;
    let mut events = Vec::new(); // grows with what is there, whatever length was declared
    for _ in 0..count {
        events.push(scan.event()?);
    }
    let rank = if fields > 2 && !scan.nil() { Some(scan.unsigned().filter(|&rank| rank <= MAX_RANK)? as u32) } else { None };
    for _ in 3..fields {
        scan.scalar()?;
    }
    (scan.at == batch.len()).then_some(Batch { ts, rank, events })
}

/// What the fields of an event said so far.
#[derive(Default)]
struct Said<'a> {
    seen: u32,
    hashes: Option<Vec<u64>>,
    parent: Option<u64>,
    tokens: Option<Vec<u8>>,
    block_size: Option<u32>,
    medium: Option<&'a str>,
    /// Extra keys listed, none of which is any.
    listed: Option<usize>,
    group: u32,
    kind: Option<&'a str>,
}

struct Scan<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Said<'a> {
    fn event(self, tag: &[u8]) -> Option<Event<'a>> {
        let Said { medium, group, kind, parent, .. } = self;
        match tag {
            STORED => {
                let hashes = self.hashes?;
                if self.listed.is_some_and(|listed| listed < hashes.len()) {
                    return None;
                }
                Some(Event::Stored { hashes, parent, tokens: self.tokens?, block_size: self.block_size?, medium, group, kind })
            }
            REMOVED => Some(Event::Removed { hashes: self.hashes?, medium, group }),
            CLEARED => Some(Event::Cleared),
            _ => None,
        }
    }
}

impl<'a> Scan<'a> {
    fn byte(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    /// A big-endian length of `width` bytes after the header byte.
    fn length(&self, width: usize) -> Option<usize> {
        let bytes = self.data.get(self.at + 1..self.at + 1 + width)?;
        Some(bytes.iter().fold(0, |sum, b| sum << 8 | usize::from(*b)))
    }

    /// Elements and header size of the array here.
    fn array_here(&self) -> Option<(usize, usize)> {
        match self.byte()? {
            head @ 0x90..=0x9f => Some((usize::from(head & 0x0f), 1)),
            0xdc => Some((self.length(2)?, 3)),
            0xdd => Some((self.length(4)?, 5)),
            _ => None,
        }
    }

    /// Pass nil, if it is here.
    fn nil(&mut self) -> bool {
        let here = self.byte() == Some(0xc0);
        self.at += usize::from(here);
        here
    }

    fn unsigned(&mut self) -> Option<u64> {
        let (value, size) = match self.byte()? {
            small @ 0x00..=0x7f => (u64::from(small), 1),
            0xcc => (self.length(1)? as u64, 2),
            0xcd => (self.length(2)? as u64, 3),
            0xce => (self.length(4)? as u64, 5),
            0xcf => (self.length(8)? as u64, 9),
            _ => return None,
        };
        self.at += size;
        Some(value)
    }

    /// A name of a block: any integer, or at least 8 bytes, reduced to 64 bits.
    fn name(&mut self) -> Option<u64> {
        let (value, size) = match self.byte()? {
            negative @ 0xe0..=0xff => (negative as i8 as i64 as u64, 1),
            0xd0 => (self.length(1)? as u8 as i8 as i64 as u64, 2),
            0xd1 => (self.length(2)? as u16 as i16 as i64 as u64, 3),
            0xd2 => (self.length(4)? as u32 as i32 as i64 as u64, 5),
            0xd3 => (self.length(8)? as u64, 9),
            0xc4 => {
                let size = 2 + self.length(1)?;
                let end = self.data.get(self.at + 2..self.at + size)?.last_chunk::<8>()?;
                (u64::from_be_bytes(*end), size)
            }
            _ => return self.unsigned(),
        };
        self.at += size;
        Some(value)
    }

    fn names(&mut self) -> Option<Vec<u64>> {
        let count = self.array()?;
        // A name takes a byte at least, so what is reserved is bounded by what was sent.
        let mut names = Vec::with_capacity(count.min(self.data.len() - self.at));
        for _ in 0..count {
            names.push(self.name()?);
        }
        Some(names)
    }

    fn real(&mut self) -> Option<f64> {
        if self.byte()? == 0xcb {
            let value = f64::from_be_bytes(*self.data.get(self.at + 1..)?.first_chunk::<8>()?);
            self.at += 9;
            return Some(value);
        }
        // Integers that a float holds exactly.
        self.unsigned().filter(|&value| value < 1 << 53).map(|value| value as f64)
    }

    /// Pass a text, of which the ordinary decoder would think as well of.
    fn string(&mut self) -> Option<&'a str> {
        let text = self.text()?;
        self.skip()?;
        std::str::from_utf8(text).ok()
    }

    /// Pass a value with nothing in it that could be wrong.
    fn scalar(&mut self) -> Option<()> {
        match self.byte()? {
            0xa0..=0xbf | 0xd9..=0xdb => self.string().map(|_| ()),
            0x80..=0x9f | 0xdc..=0xdf => None,
            _ => self.skip(),
        }
    }

    fn event(&mut self) -> Option<Event<'a>> {
        if let Some(fields) = self.peek_array() {
            self.array()?;
            let tag = if fields > 0 { self.text()? } else { return None };
            self.skip()?;
            let names: &[&[u8]] = match tag {
                STORED => &STORED_FIELDS,
                REMOVED => &REMOVED_FIELDS,
                CLEARED => &[],
                _ => return None,
            };
            let mut said = Said::default();
            for field in 1..fields {
                match names.get(field - 1) {
                    Some(name) => self.field(name, &mut said)?,
                    None => self.scalar()?,
                }
            }
            return said.event(tag);
        }
        let count = self.map()?;
        let mut said = Said::default();
        let mut tag: Option<&[u8]> = None;
        for _ in 0..count {
            let key = self.string()?.as_bytes();
            if key == b"type" {
                if tag.is_some() {
                    return None;
                }
                tag = Some(self.string()?.as_bytes());
            } else {
                self.field(key, &mut said)?;
            }
        }
        said.event(tag?)
    }

    fn field(&mut self, name: &[u8], said: &mut Said<'a>) -> Option<()> {
        if let Some(at) = STORED_FIELDS.iter().position(|&known| known == name) {
            if said.seen & (1 << at) != 0 {
                return None;
            }
            said.seen |= 1 << at;
        }
        if self.nil() {
            return Some(());
        }
        match name {
            b"block_hashes" => said.hashes = Some(self.names()?),
            b"parent_block_hash" => said.parent = Some(self.name()?),
            b"token_ids" => said.tokens = Some(self.tokens()?),
            b"block_size" => said.block_size = Some(u32::try_from(self.unsigned()?).ok()?),
            b"medium" => said.medium = Some(self.string()?),
            b"group_idx" => said.group = self.unsigned().filter(|&group| group < MAX_GROUPS)? as u32,
            b"kv_cache_spec_kind" => said.kind = Some(self.string()?),
            b"extra_keys" => {
                let count = self.array()?;
                for _ in 0..count {
                    if !self.nil() {
                        return None;
                    }
                }
                said.listed = Some(count);
            }
            b"lora_id" | b"lora_name" | b"kv_cache_spec_sliding_window" => return None,
            _ if TELLING.contains(&name) => return None,
            _ => self.scalar()?,
        }
        Some(())
    }

    /// Pass an array of tokens below 2^32, at least one: packed.
    fn tokens(&mut self) -> Option<Vec<u8>> {
        let count = self.array()?;
        if count == 0 || count > self.data.len() - self.at {
            return None;
        }
        let mut packed = Vec::with_capacity(4 * count);
        for _ in 0..count {
            packed.extend_from_slice(&u32::try_from(self.unsigned()?).ok()?.to_le_bytes());
        }
        Some(packed)
    }

    fn peek_array(&self) -> Option<usize> {
        self.array_here().map(|(count, _)| count)
    }

    fn array(&mut self) -> Option<usize> {
        let (count, head) = self.array_here()?;
        self.at += head;
        Some(count)
    }

    fn map(&mut self) -> Option<usize> {
        let (count, head) = match self.byte()? {
            head @ 0x80..=0x8f => (usize::from(head & 0x0f), 1),
            0xde => (self.length(2)?, 3),
            0xdf => (self.length(4)?, 5),
            _ => return None,
        };
        self.at += head;
        Some(count)
    }

    /// The string here, not passed.
    fn text(&self) -> Option<&'a [u8]> {
        let (length, head) = match self.byte()? {
            head @ 0xa0..=0xbf => (usize::from(head & 0x1f), 1),
            0xd9 => (self.length(1)?, 2),
            0xda => (self.length(2)?, 3),
            _ => return None,
        };
        self.data.get(self.at + head..self.at + head + length)
    }

    /// Pass one value, whatever it holds.
    fn skip(&mut self) -> Option<()> {
        let mut left = 1usize;
        while left > 0 {
            left -= 1;
            let size = match self.byte()? {
                0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 1,
                head @ 0x80..=0x8f => {
                    left += 2 * usize::from(head & 0x0f);
                    1
                }
                head @ 0x90..=0x9f => {
                    left += usize::from(head & 0x0f);
                    1
                }
                head @ 0xa0..=0xbf => 1 + usize::from(head & 0x1f),
                0xc4 | 0xd9 => 2 + self.length(1)?,
                0xc5 | 0xda => 3 + self.length(2)?,
                0xc6 | 0xdb => 5 + self.length(4)?,
                0xcc | 0xd0 => 2,
                0xcd | 0xd1 => 3,
                0xca | 0xce | 0xd2 => 5,
                0xcb | 0xcf | 0xd3 => 9,
                0xdc => {
                    left += self.length(2)?;
                    3
                }
                0xdd => {
                    left += self.length(4)?;
                    5
                }
                0xde => {
                    left += 2 * self.length(2)?;
                    3
                }
                0xdf => {
                    left += 2 * self.length(4)?;
                    5
                }
                // Extension values, and the byte that is never used.
                _ => return None,
            };
            self.at += size;
            if self.at > self.data.len() {
                return None;
            }
        }
        Some(())
    }

    /// Pass the value here. An array of plain tokens goes to `out` packed, after what lies before it since `copied`.
    /// Returns up to where the batch has been copied.
    fn pack_tokens(&mut self, out: &mut Vec<u8>, copied: usize) -> Option<usize> {
        let start = self.at;
        let Some((count, head)) = self.array_here() else {
            self.skip()?;
            return Some(copied);
        };
        self.at += head;
        if count == 0 {
            return Some(copied);
        }
        // Every element takes a byte at least, so what is reserved is bounded by what was sent.
        if count > self.data.len() - self.at {
            return None;
        }
        let mark = out.len();
        out.extend_from_slice(&self.data[copied..start]);
        out.push(0xc9);
        out.extend_from_slice(&u32::try_from(4 * count).ok()?.to_be_bytes());
        out.push(EXTENSION);
        for _ in 0..count {
            let (value, size) = match self.byte()? {
                small @ 0x00..=0x7f => (usize::from(small), 1),
                0xcc => (self.length(1)?, 2),
                0xcd => (self.length(2)?, 3),
                0xce => (self.length(4)?, 5),
                _ => {
                    // Pairs, wide or signed integers, or no integers at all: as it is.
                    out.truncate(mark);
                    self.at = start;
                    self.skip()?;
                    return Some(copied);
                }
            };
            out.extend_from_slice(&(value as u32).to_le_bytes());
            self.at += size;
        }
        Some(self.at)
    }
}
