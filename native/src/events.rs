//! Token ids in a msgpack event batch, packed.
//!
//! Strategy. As in `prompt`: one scan over the batch finds the `token_ids` of its events and writes the batch anew with
//! each plain array of them as one extension value of packed little-endian u32, so that decoding makes no Python object
//! per token. Everything else is copied as it is, for the ordinary decoder to judge. Where a batch is out of the
//! ordinary (extension values of its own, tokens past 32 bits, anything malformed) the answer is None.

const TOKEN_KEY: &[u8] = b"token_ids";
const STORED: &[u8] = b"BlockStored";
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

struct Scan<'a> {
    data: &'a [u8],
    at: usize,
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
