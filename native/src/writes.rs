//! Block writes as they travel from an inventory to an index: 32 bytes each, as `PackedWrites` in proto/index.py.

use std::collections::hash_map::{Entry, HashMap};

pub const SIZE: usize = 32;
/// Of proto/index.py: depths per page.
pub const PAGE_SPAN: u32 = 32;
pub type Key = [u8; 8];

/// The absolute state of one block.
#[derive(Clone, Copy)]
pub struct Write {
    pub key: Key,
    pub parent: Option<Key>,
    pub head: Key,
    pub depth: u32,
    pub tiers: u8,
}

impl Write {
    pub fn pack(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.parent.unwrap_or_default());
        out.extend_from_slice(&self.head);
        out.extend_from_slice(&self.depth.to_le_bytes());
        out.extend_from_slice(&[self.tiers, u8::from(self.parent.is_some()), 0, 0]);
    }
}

pub fn key(write: &[u8]) -> Key {
    write[..8].try_into().unwrap()
}

pub fn head(write: &[u8]) -> Key {
    write[16..24].try_into().unwrap()
}

fn depth(write: &[u8]) -> u32 {
    u32::from_le_bytes(write[24..28].try_into().unwrap())
}

pub fn tiers(write: &[u8]) -> u8 {
    write[28]
}

/// The newest state of every block, in the order the blocks first occur.
pub fn newest<'a>(parts: &[&'a [u8]]) -> Vec<&'a [u8]> {
    let mut places: HashMap<Key, usize, KeyHash> = HashMap::default();
    let mut all: Vec<&[u8]> = Vec::new();
    for write in parts.iter().flat_map(|part| part.chunks_exact(SIZE)) {
        match places.entry(key(write)) {
            Entry::Occupied(at) => all[*at.get()] = write,
            Entry::Vacant(at) => {
                at.insert(all.len());
                all.push(write);
            }
        }
    }
    all
}

/// The same in the order of writing: what appears with parents first, then what goes with children first, page by page.
pub fn merge(parts: &[&[u8]]) -> Vec<u8> {
    let mut all = newest(parts);
    all.sort_by_key(|write| {
        let (gone, page, depth) = (tiers(write) == 0, depth(write) / PAGE_SPAN, depth(write));
        if gone { (gone, u32::MAX - page, head(write), u32::MAX - depth) } else { (gone, page, head(write), depth) }
    });
    all.concat()
}

/// Per page, in the order they first occur: its head, and (key, tiers) of each block in it, once with its newest state.
pub fn by_page(raw: &[u8]) -> Vec<(Key, Vec<u8>)> {
    let mut pages: Vec<(Key, Vec<u8>)> = Vec::new();
    let mut page_of: HashMap<Key, usize, KeyHash> = HashMap::default();
    let mut place_of: HashMap<(Key, Key), usize, KeyHash> = HashMap::default();
    for write in raw.chunks_exact(SIZE) {
        let page = *page_of.entry(head(write)).or_insert_with(|| {
            pages.push((head(write), Vec::new()));
            pages.len() - 1
        });
        let entries = &mut pages[page].1;
        match place_of.entry((head(write), key(write))) {
            Entry::Occupied(at) => entries[at.get() + 8] = tiers(write),
            Entry::Vacant(at) => {
                at.insert(entries.len());
                entries.extend_from_slice(&key(write));
                entries.push(tiers(write));
            }
        }
    }
    pages
}

/// The writes of each page, in the order pages first occur.
pub fn pages(raw: &[u8]) -> Vec<(Key, Vec<u8>)> {
    let mut pages: Vec<(Key, Vec<u8>)> = Vec::new();
    let mut places: HashMap<Key, usize, KeyHash> = HashMap::default();
    for write in raw.chunks_exact(SIZE) {
        let place = *places.entry(head(write)).or_insert_with(|| {
            pages.push((head(write), Vec::new()));
            pages.len() - 1
        });
        pages[place].1.extend_from_slice(write);
    }
    pages
}

/// Keys are parts of SHA-256 hashes, or names an engine chose; mixing keeps the latter from piling up.
#[derive(Default, Clone)]
pub struct KeyHash;

impl std::hash::BuildHasher for KeyHash {
    type Hasher = Mixer;
    fn build_hasher(&self) -> Mixer {
        Mixer(0)
    }
}

pub struct Mixer(u64);

impl std::hash::Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks_exact(8) {
            self.write_u64(u64::from_le_bytes(word.try_into().unwrap()));
        }
    }
    fn write_usize(&mut self, _: usize) {} // a length prefix: keys are all as long, and nothing else is hashed
    fn write_u64(&mut self, word: u64) {
        self.0 = mix(self.0 ^ word);
    }
}

/// The finalizer of MurmurHash3: every bit of a word reaches every bit of the result.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}
