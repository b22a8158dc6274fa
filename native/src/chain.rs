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
        m.clear();
        m.extend_from_slice(&[0x83, 0x58, 0x20]);
        m.extend_from_slice(parent);
        head(m, 0x80, (tokens.len() / 4) as u32);
        for token in tokens.chunks_exact(4) {
            head(m, 0, u32::from_le_bytes([token[0], token[1], token[2], token[3]]));
        }
        match extra {
            Some(encoded) => m.extend_from_slice(encoded),
            None => m.push(NULL),
        }
        Sha256::digest(m.as_slice()).into()
    }
}

/// CBOR initial byte and argument, in the shortest form.
#[inline]
fn head(out: &mut Vec<u8>, major: u8, value: u32) {
    match value {
        0..=23 => out.push(major | value as u8),
        24..=0xff => out.extend_from_slice(&[major | 24, value as u8]),
        0x100..=0xffff => {
            let b = (value as u16).to_be_bytes();
            out.extend_from_slice(&[major | 25, b[0], b[1]]);
        }
        _ => {
            let b = value.to_be_bytes();
            out.extend_from_slice(&[major | 26, b[0], b[1], b[2], b[3]]);
        }
    }
}
