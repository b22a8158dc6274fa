//! Which blocks the holders of one index have, by block and by page: twin of `Holdings` in indexer/holdings.py.
//!
//! A block's holders are a bitmap over slots: one word for the first 64, a list of words in `wide` for those beyond.
//! Per holder and page its blocks lie in a short list, or in a map where a page branches.

use crate::writes::{self, mix, Key, KeyHash};
use hashbrown::HashTable;
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};
use std::collections::{BTreeMap, HashMap};

/// `PAGE_SPAN` and `THROUGH` of proto/index.py, `MAX_EMPTIED` of indexer/holdings.py.
const PAGE_SPAN: usize = 32;
const THROUGH: u8 = 1 << 3;
const MAX_EMPTIED: usize = 1024;
/// Longest list that is searched from end to end.
const FEW: usize = 2 * PAGE_SPAN;

enum Blocks {
    Few(Vec<(Key, u8)>),
    Many(HashMap<Key, u8, KeyHash>),
}

impl Blocks {
    fn get(&self, key: &Key) -> u8 {
        match self {
            Blocks::Few(list) => list.iter().find(|(at, _)| at == key).map_or(0, |&(_, tiers)| tiers),
            Blocks::Many(map) => map.get(key).copied().unwrap_or(0),
        }
    }

    /// Returns what was there before.
    fn set(&mut self, key: Key, tiers: u8) -> u8 {
        if let Blocks::Few(list) = self {
            if tiers != 0 && list.len() >= FEW && list.iter().all(|(at, _)| *at != key) {
                *self = Blocks::Many(list.drain(..).collect());
            }
        }
        match self {
            Blocks::Few(list) => match list.iter().position(|(at, _)| *at == key) {
                Some(at) if tiers == 0 => list.swap_remove(at).1,
                Some(at) => std::mem::replace(&mut list[at].1, tiers),
                None => {
                    if tiers != 0 {
                        if list.len() == list.capacity() {
                            list.reserve_exact(list.len().clamp(1, 8));
                        }
                        list.push((key, tiers));
                    }
                    0
                }
            },
            Blocks::Many(map) if tiers == 0 => map.remove(&key).unwrap_or(0),
            Blocks::Many(map) => map.insert(key, tiers).unwrap_or(0),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Blocks::Few(list) => list.is_empty(),
            Blocks::Many(map) => map.is_empty(),
        }
    }

    fn all(&self) -> Vec<(Key, u8)> {
        match self {
            Blocks::Few(list) => list.clone(),
            Blocks::Many(map) => map.iter().map(|(&key, &tiers)| (key, tiers)).collect(),
        }
    }
}

struct Page {
    version: u64,
    blocks: Blocks,
    /// Bit per tier that was the fastest of some block here since the page was last empty.
    fastest: u8,
}

/// Newest versions of pages that were emptied, the oldest forgotten first.
#[derive(Default)]
struct Emptied {
    versions: HashMap<Key, (u64, u64), KeyHash>,
    order: BTreeMap<u64, Key>,
    count: u64,
}

impl Emptied {
    fn take(&mut self, head: &Key) -> u64 {
        let Some((version, order)) = self.versions.remove(head) else { return 0 };
        self.order.remove(&order);
        version
    }

    fn add(&mut self, head: Key, version: u64) {
        self.count += 1;
        self.versions.insert(head, (version, self.count));
        self.order.insert(self.count, head);
        while self.order.len() > MAX_EMPTIED {
            if let Some((_, head)) = self.order.pop_first() {
                self.versions.remove(&head);
            }
        }
    }
}

#[derive(Default)]
struct Holder {
    pages: HashMap<Key, Page, KeyHash>,
    emptied: Emptied,
}

#[derive(Default)]
struct Masks {
    narrow: HashTable<(Key, u64)>,
    wide: HashMap<Key, Vec<u64>, KeyHash>,
}

fn spread(key: &Key) -> u64 {
    mix(u64::from_le_bytes(*key))
}

impl Masks {
    fn set(&mut self, key: &Key, slot: usize) {
        if slot < 64 {
            let entry =
                self.narrow.entry(spread(key), |(at, _)| at == key, |(at, _)| spread(at)).or_insert((*key, 0));
            entry.into_mut().1 |= 1 << slot;
            return;
        }
        let words = self.wide.entry(*key).or_default();
        let (word, bit) = (slot / 64 - 1, 1 << (slot % 64));
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        words[word] |= bit;
    }

    fn clear(&mut self, key: &Key, slot: usize) {
        if slot < 64 {
            if let Ok(mut entry) = self.narrow.find_entry(spread(key), |(at, _)| at == key) {
                entry.get_mut().1 &= !(1 << slot);
                if entry.get().1 == 0 {
                    entry.remove();
                }
            }
        } else if let Some(words) = self.wide.get_mut(key) {
            if let Some(word) = words.get_mut(slot / 64 - 1) {
                *word &= !(1 << (slot % 64));
            }
            if words.iter().all(|&word| word == 0) {
                self.wide.remove(key);
            }
        }
    }

    /// Do all of these hold the block?
    fn covers(&self, key: &Key, alive: &[u64]) -> bool {
        self.words(key, alive.len()).zip(alive).all(|(word, &alive)| word & alive == alive)
    }

    /// Leave of these only those who hold the block. Returns the others.
    fn part(&self, key: &Key, alive: &mut [u64]) -> Vec<u64> {
        let gone = self.words(key, alive.len()).zip(alive.iter()).map(|(word, &alive)| alive & !word).collect::<Vec<_>>();
        alive.iter_mut().zip(&gone).for_each(|(alive, gone)| *alive &= !gone);
        gone
    }

    /// The first `count` words of a block's mask.
    fn words(&self, key: &Key, count: usize) -> impl Iterator<Item = u64> + '_ {
        let wide = if count > 1 { self.wide.get(key) } else { None };
        let further = wide.into_iter().flatten().copied().chain(std::iter::repeat(0));
        std::iter::once(self.narrow(key)).chain(further).take(count)
    }

    fn narrow(&self, key: &Key) -> u64 {
        self.narrow.find(spread(key), |(at, _)| at == key).map_or(0, |&(_, mask)| mask)
    }
}

#[pyclass(module = "metatrie_native")]
#[derive(Default)]
pub struct Holdings {
    holders: HashMap<usize, Holder>,
    masks: Masks,
}

impl Holdings {
    fn page(holder: &mut Holder, head: Key) -> &mut Page {
        let Holder { pages, emptied } = holder;
        pages.entry(head).or_insert_with(|| Page {
            version: emptied.take(&head),
            blocks: Blocks::Few(Vec::new()),
            fastest: 0,
        })
    }

    fn set(masks: &mut Masks, page: &mut Page, slot: usize, key: Key, tiers: u8) -> u8 {
        let before = page.blocks.set(key, tiers);
        if tiers == 0 {
            if before != 0 {
                masks.clear(&key, slot);
            }
            return 0;
        }
        if before == 0 {
            masks.set(&key, slot);
        }
        let fastest = tiers & tiers.wrapping_neg();
        page.fastest |= fastest;
        fastest | tiers & THROUGH
    }

    fn forget_empty(holder: &mut Holder, heads: impl IntoIterator<Item = Key>) {
        for head in heads {
            if holder.pages.get(&head).is_some_and(|page| page.blocks.is_empty()) {
                if let Some(page) = holder.pages.remove(&head) {
                    holder.emptied.add(head, page.version);
                }
            }
        }
    }

    fn page_of(&self, slot: usize, keys: &Bound<'_, PyList>, start: usize) -> PyResult<&Page> {
        let head = key_at(keys, start)?;
        let page = self.holders.get(&slot).and_then(|holder| holder.pages.get(&head));
        page.ok_or_else(|| PyKeyError::new_err("it holds no such page"))
    }
}

/// A mask as words, the lowest first.
fn words_of(mask: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(word) = mask.extract::<u64>() {
        return Ok(vec![word]);
    }
    let words = mask.call_method0("bit_length")?.extract::<usize>()?.div_ceil(64);
    let bytes = mask.call_method1("to_bytes", (8 * words, "little"))?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
}

fn int_of<'py>(py: Python<'py>, words: &[u64]) -> PyResult<Bound<'py, PyAny>> {
    if let [word] = words {
        return Ok(word.into_pyobject(py)?.into_any());
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    py.get_type::<PyInt>().call_method1("from_bytes", (PyBytes::new(py, &bytes), "little"))
}

fn key_at(keys: &Bound<'_, PyList>, at: usize) -> PyResult<Key> {
    let key = keys.get_item(at)?;
    key.cast::<PyBytes>()?.as_bytes().try_into().map_err(|_| PyKeyError::new_err("keys have 8 bytes"))
}

#[pymethods]
impl Holdings {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn write(&mut self, slot: usize, version: u64, raw: &[u8]) -> PyResult<u8> {
        if raw.len() % writes::SIZE != 0 {
            return Err(PyValueError::new_err("raw: a whole number of writes"));
        }
        let holder = self.holders.entry(slot).or_default();
        let (mut seen, mut at) = (0, 0);
        let mut vacating = Vec::new();
        while at < raw.len() {
            // Blocks of a page mostly come together.
            let head = writes::head(&raw[at..]);
            let page = Self::page(holder, head);
            let stale = version < page.version;
            page.version = page.version.max(version);
            while at < raw.len() && writes::head(&raw[at..]) == head {
                if !stale {
                    let write = &raw[at..at + writes::SIZE];
                    seen |= Self::set(&mut self.masks, page, slot, writes::key(write), writes::tiers(write));
                }
                at += writes::SIZE;
            }
            if page.blocks.is_empty() {
                vacating.push(head);
            }
        }
        Self::forget_empty(holder, vacating);
        Ok(seen)
    }

    fn refresh(&mut self, slot: usize, version: u64, raw: &[u8]) -> (usize, u8) {
        let holder = self.holders.entry(slot).or_default();
        let (mut wrong, mut seen) = (0, 0);
        let mut heads = Vec::new();
        for (head, entries) in writes::by_page(raw) {
            heads.push(head);
            let page = Self::page(holder, head);
            if version < page.version {
                continue;
            }
            page.version = version;
            let content: HashMap<Key, u8, KeyHash> =
                entries.chunks_exact(9).map(|entry| (writes::key(entry), entry[8])).collect();
            for (key, _) in page.blocks.all() {
                if !content.contains_key(&key) {
                    Self::set(&mut self.masks, page, slot, key, 0);
                    wrong += 1;
                }
            }
            for (key, tiers) in content {
                if page.blocks.get(&key) != tiers {
                    seen |= Self::set(&mut self.masks, page, slot, key, tiers);
                    wrong += 1;
                }
            }
        }
        Self::forget_empty(holder, heads);
        (wrong, seen)
    }

    fn mask<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        let Ok(key) = <&Key>::try_from(key) else { return Ok(0u8.into_pyobject(py)?.into_any()) };
        let narrow = self.masks.narrow(key);
        match if self.masks.wide.is_empty() { None } else { self.masks.wide.get(key) } {
            None => Ok(narrow.into_pyobject(py)?.into_any()),
            Some(words) => int_of(py, &[&[narrow], words.as_slice()].concat()),
        }
    }

    fn walk<'py>(
        &self,
        keys: &Bound<'py, PyList>,
        start: usize,
        stop: usize,
        alive: &Bound<'py, PyAny>,
    ) -> PyResult<(Vec<(Bound<'py, PyAny>, usize)>, Bound<'py, PyAny>)> {
        let py = keys.py();
        let mut alive = words_of(alive)?;
        let mut ended = Vec::new();
        let mut at = start;
        while at < stop && alive.iter().any(|&word| word != 0) {
            let end = stop.min(at + PAGE_SPAN);
            let whole = self.masks.covers(&key_at(keys, at)?, &alive) && self.masks.covers(&key_at(keys, end - 1)?, &alive);
            for depth in if whole { end..end } else { at..end } {
                let key = key_at(keys, depth)?;
                if !self.masks.covers(&key, &alive) {
                    let gone = self.masks.part(&key, &mut alive);
                    ended.push((int_of(py, &gone)?, depth));
                }
            }
            at = end;
        }
        Ok((ended, int_of(py, &alive)?))
    }

    fn tiers(&self, slot: usize, keys: &Bound<'_, PyList>, blocks: usize) -> PyResult<(usize, usize, usize)> {
        let mut counts = [0usize; 8];
        for start in (0..blocks).step_by(PAGE_SPAN) {
            let stop = blocks.min(start + PAGE_SPAN);
            let page = self.page_of(slot, keys, start)?;
            if page.fastest.is_power_of_two() {
                counts[page.fastest.trailing_zeros() as usize] += stop - start;
                continue;
            }
            for at in start..stop {
                let tiers = page.blocks.get(&key_at(keys, at)?);
                counts[(tiers & !THROUGH).trailing_zeros().min(7) as usize] += 1;
            }
        }
        Ok((counts[0], counts[1], counts[2]))
    }

    fn usable(&self, slot: usize, keys: &Bound<'_, PyList>, mut blocks: usize) -> PyResult<usize> {
        while blocks > 0 {
            let page = self.page_of(slot, keys, (blocks - 1) / PAGE_SPAN * PAGE_SPAN)?;
            if page.blocks.get(&key_at(keys, blocks - 1)?) & THROUGH == 0 {
                break;
            }
            blocks -= 1;
        }
        Ok(blocks)
    }

    fn heads<'py>(&self, py: Python<'py>, slot: usize) -> PyResult<Bound<'py, PyList>> {
        let heads: Vec<_> = self.holders.get(&slot).map_or_else(Vec::new, |holder| {
            holder.pages.keys().map(|head| PyBytes::new(py, head)).collect()
        });
        PyList::new(py, heads)
    }

    fn content<'py>(
        &self,
        py: Python<'py>,
        slot: usize,
        heads: Vec<Bound<'py, PyBytes>>,
    ) -> Vec<(Bound<'py, PyBytes>, u8)> {
        let Some(holder) = self.holders.get(&slot) else { return Vec::new() };
        let pages = heads.iter().filter_map(|head| holder.pages.get(<&Key>::try_from(head.as_bytes()).ok()?));
        pages.flat_map(|page| page.blocks.all()).map(|(key, tiers)| (PyBytes::new(py, &key), tiers)).collect()
    }

    fn vacate(&mut self, slot: usize, pages: usize) -> (usize, bool) {
        let Some(holder) = self.holders.get_mut(&slot) else { return (0, true) };
        let heads: Vec<Key> = holder.pages.keys().take(pages).copied().collect();
        for head in &heads {
            if let Some(page) = holder.pages.remove(head) {
                for (key, _) in page.blocks.all() {
                    self.masks.clear(&key, slot);
                }
            }
        }
        let empty = holder.pages.is_empty();
        if empty {
            self.holders.remove(&slot);
        }
        (heads.len(), empty)
    }
}
