//! Hashes of spans seen before: a prefix that many prompts share is hashed once.
//!
//! A span is named by a keyed 128-bit digest of its parent hash and its tokens, under a key of this process, so nothing
//! kept gives a token away, and nobody who cannot read our memory can make two spans meet. Looking one up costs a
//! fifth of hashing it.
//!
//! Bound: `capacity` spans, about 220 bytes each, in two generations: what was not asked for during a whole generation
//! is forgotten.

use crate::chain::Hash;
use siphasher::sip128::{Hasher128, SipHasher13};
use std::collections::hash_map::RandomState;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

/// Blocks per span: half a page's. The fewer, the less is hashed again where a prompt parts from a known one, and the
/// more there is to look up.
pub const SPAN: usize = 16;
pub const KEY_BYTES: usize = 8;

pub struct Span {
    pub keys: [u8; SPAN * KEY_BYTES],
    pub last: Hash,
}

pub struct Memo {
    key: (u64, u64),
    capacity: usize,
    young: HashMap<u128, Box<Span>>,
    old: HashMap<u128, Box<Span>>,
}

impl Memo {
    pub fn new(capacity: usize) -> Self {
        // What the standard library seeds its own maps with: random per process.
        let random = || RandomState::new().build_hasher().finish();
        Memo { key: (random(), random()), capacity: capacity.max(2), young: HashMap::new(), old: HashMap::new() }
    }

    pub fn name(&self, parent: &Hash, tokens: &[u8]) -> u128 {
        let mut hasher = SipHasher13::new_with_keys(self.key.0, self.key.1);
        // The number of tokens tells the block size, since a span has a fixed number of blocks.
        hasher.write_usize(tokens.len());
        hasher.write(parent);
        hasher.write(tokens);
        hasher.finish128().as_u128()
    }

    pub fn get(&mut self, name: u128) -> Option<&Span> {
        if !self.young.contains_key(&name) {
            let span = self.old.remove(&name)?;
            self.put(name, span);
        }
        self.young.get(&name).map(|span| &**span)
    }

    pub fn put(&mut self, name: u128, span: Box<Span>) {
        if self.young.len() >= self.capacity / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(name, span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(n: u8) -> Box<Span> {
        Box::new(Span { keys: [n; SPAN * KEY_BYTES], last: [n; 32] })
    }

    #[test]
    fn what_is_asked_for_stays_and_the_rest_goes() {
        let mut memo = Memo::new(8);
        memo.put(0, span(0));
        for n in 1..200u8 {
            memo.put(u128::from(n), span(n));
            assert_eq!(memo.get(0).unwrap().last, [0; 32]);
            assert!(memo.young.len() + memo.old.len() <= 8);
        }
        assert!(memo.get(1).is_none());
    }

    #[test]
    fn names_depend_on_everything() {
        let memo = Memo::new(8);
        let names = [
            memo.name(&[0; 32], &[1; 128]),
            memo.name(&[1; 32], &[1; 128]),
            memo.name(&[0; 32], &[2; 128]),
            memo.name(&[0; 32], &[1; 256]),
        ];
        assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), 4);
    }
}
