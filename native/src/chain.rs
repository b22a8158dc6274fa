//! Canonical block hashes: SHA-256 over canonical CBOR of `[parent, tokens, extra keys]`, as proto/hashing.py says.

use sha2::{Digest, Sha256};

pub type Hash = [u8; 32];
const NULL: u8 = 0xf6;

/// Hashes one block after another, reusing its buffer.
#[derive(Default)]
pub struct Hasher {
    message: Vec<u8>,
}

impl Hasher {
    /// Hash of the block with these packed little-endian u32 tokens. `extra`: its extra keys, as CBOR already.
    pub fn block(&mut self, parent: &Hash, tokens: &[u8], extra: Option<&[u8]>) -> Hash {
        let m = &mut self.message;
        let count = tokens.len() / 4;
        // Room for every item at its longest, so that each is written without a look at what is left.
        m.clear();
        m.resize(OPENING.len() + 32 + (count + 1) * WIDEST + SPARE, 0);
        m[..3].copy_from_slice(&OPENING);
        m[3..35].copy_from_slice(parent);
        let mut at = 35 + item(&mut m[35..], 0x80, count as u32);
        for token in tokens.chunks_exact(4) {
            at += item(&mut m[at..], 0, u32::from_le_bytes([token[0], token[1], token[2], token[3]]));
        }
        m.truncate(at);
        match extra {
            Some(encoded) => m.extend_from_slice(encoded),
            None => m.push(NULL),
        }
        Sha256::digest(m.as_slice()).into()
    }
}

/// An array of three, and a string of 32 bytes.
const OPENING: [u8; 3] = [0x83, 0x58, 0x20];
/// Bytes of the longest item.
const WIDEST: usize = 5;
/// Bytes `item` writes beyond it.
const SPARE: usize = 3;

/// CBOR initial byte and argument, in the shortest form. Returns its length; what follows up to 8 bytes is overwritten.
///
/// Tokens need three bytes or five much as a coin falls, so the form is chosen without a branch.
#[inline(always)]
fn item(out: &mut [u8], major: u8, value: u32) -> usize {
    let (two, three, five) = (value > 23, value > 0xff, value > 0xffff);
    let length = 1 + usize::from(two) + usize::from(three) + 2 * usize::from(five);
    let first = if two { 23 + u64::from(two) + u64::from(three) + u64::from(five) } else { u64::from(value) };
    let argument = if two { u64::from(value) << (64 - 8 * length) } else { 0 };
    let word = (u64::from(major) | first) << 56 | argument;
    out[..8].copy_from_slice(&word.to_be_bytes());
    length
}
