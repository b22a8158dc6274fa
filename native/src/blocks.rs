//! The blocks of one replica: how they hang together, and what of them the index must show. Twin of `BlockTable` in
//! consumers/blocks.py, which says what each method means.
//!
//! Strategy. Nodes live in an arena and name each other by slot. Nearly every block is *plain*: it carries one index
//! block, whose key is the end of its own hash, so its whole state is the fixed record `Node`, and two tables of slots
//! find it by engine hash and by key; where the engine names its blocks by their keys the former does for both. What a
//! plain block does not need (several keys or none, tokens that wait) lies in `odd`; keys claimed by blocks of that kind,
//! or by several blocks, lie in `contested`.
//!
//! Invariants. A slot is given back only at the end of `settle`, so what was dropped since the last one still answers.
//! A handle carries the birth of its node as well as the slot, so it never answers for another. While an attached node
//! has a key, either one node is its OWNER (found through `names` or `claims`), or the key is in `contested`.

use crate::chain;
use crate::copies::Copies;
use crate::writes::{self, mix, Key, KeyHash, Write, PAGE_SPAN};
use hashbrown::HashTable;
use pyo3::exceptions::{PyReferenceError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::collections::HashMap;

const NONE: u32 = u32::MAX;
const CHUNK: usize = 1024;
/// Of proto/index.py.
const THROUGH: u8 = 1 << 3;

const DIGEST: u16 = 1;
/// The digest is an engine's own name, 8 bytes.
const SHORT: u16 = 1 << 1;
/// The engine's digest is ours.
const SAME: u16 = 1 << 2;
const HEAD: u16 = 1 << 3;
/// It has one key, the end of its digest.
const PLAIN: u16 = 1 << 4;
const TAIL: u16 = 1 << 5;
const PLACED: u16 = 1 << 6;
const OPAQUE: u16 = 1 << 7;
const LACKING: u16 = 1 << 8;
const DIRTY: u16 = 1 << 9;
/// Met by the running `settle`.
const MET: u16 = 1 << 10;
/// Known by its engine hash.
const LIVE: u16 = 1 << 11;
/// The only node that claims its key, and plain.
const OWNER: u16 = 1 << 12;

struct Node {
    hash: u64,
    digest: chain::Hash,
    head: Key,
    depth: u32,
    parent: u32,
    below: u32,
    next: u32,
    previous: u32,
    birth: u32,
    flags: u16,
    tiers: u8,
    mask: u8,
}

impl Node {
    fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    fn set(&mut self, flag: u16, on: bool) {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
    }

    /// The end of its digest: the key of the last index block at or before its end.
    fn key(&self) -> Key {
        self.digest[24..].try_into().unwrap()
    }

    /// Its engine calls it by its key.
    fn named(&self) -> bool {
        self.digest[24..] == self.hash.to_be_bytes()
    }
}

#[derive(Default)]
struct Odd {
    keys: Vec<Key>,
    engine_digest: Option<Py<PyBytes>>,
    tail: Option<Py<PyAny>>,
    pending: Option<Py<PyAny>>,
}

#[derive(Default)]
struct Arena {
    chunks: Vec<Vec<Node>>,
    free: Vec<u32>,
}

impl Arena {
    fn at(&self, slot: u32) -> &Node {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn at_mut(&mut self, slot: u32) -> &mut Node {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn slots(&self) -> impl Iterator<Item = (u32, &Node)> {
        self.chunks.iter().flatten().enumerate().map(|(slot, node)| (slot as u32, node))
    }

    fn add(&mut self, node: Node) -> u32 {
        if let Some(slot) = self.free.pop() {
            *self.at_mut(slot) = node;
            return slot;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let chunk = self.chunks.len() - 1;
        self.chunks[chunk].push(node);
        (chunk * CHUNK + self.chunks[chunk].len() - 1) as u32
    }
}

#[pyclass(module = "metatrie_native")]
#[derive(Default)]
pub struct BlockTable {
    arena: Arena,
    odd: HashMap<u32, Odd>,
    names: HashTable<u32>,
    claims: HashTable<u32>,
    /// Owners that are not in `claims`, since they are named by their key.
    named: usize,
    contested: HashMap<Key, Vec<u32>, KeyHash>,
    dirty: Vec<u32>,
    dropped: Vec<u32>,
    emitted: Vec<u8>,
    births: u32,
    contests: u32,
    #[pyo3(get)]
    held: usize,
    #[pyo3(get)]
    attached: usize,
    #[pyo3(get)]
    ambiguous: usize,
}

fn spread(key: &Key) -> u64 {
    mix(u64::from_le_bytes(*key))
}

impl BlockTable {
    fn find(&self, hash: u64) -> Option<u32> {
        self.names.find(mix(hash), |&slot| self.arena.at(slot).hash == hash).copied()
    }

    fn claimant(&self, key: &Key) -> Option<u32> {
        let owns = |&slot: &u32| self.arena.at(slot).has(OWNER) && self.arena.at(slot).key() == *key;
        let named = self.find(u64::from_be_bytes(*key)).filter(owns);
        if named.is_some() || self.claims.is_empty() {
            return named;
        }
        self.claims.find(spread(key), |&slot| self.arena.at(slot).key() == *key).copied()
    }

    fn create(&mut self, mut node: Node) -> u32 {
        self.births = self.births.wrapping_add(1);
        node.birth = self.births;
        node.flags |= LIVE;
        let hash = node.hash;
        let slot = self.arena.add(node);
        let arena = &self.arena;
        self.names.insert_unique(mix(hash), slot, |&slot| mix(arena.at(slot).hash));
        slot
    }

    fn own(&mut self, slot: u32) {
        let node = self.arena.at_mut(slot);
        node.set(OWNER, true);
        if node.named() {
            self.named += 1;
            return;
        }
        let arena = &self.arena;
        self.claims.insert_unique(spread(&arena.at(slot).key()), slot, |&slot| spread(&arena.at(slot).key()));
    }

    /// The node owns its key no more, if it did.
    fn disown(&mut self, slot: u32) {
        let node = self.arena.at_mut(slot);
        if !node.has(OWNER) {
            return;
        }
        node.set(OWNER, false);
        if node.named() {
            self.named -= 1;
        } else if let Ok(entry) = self.claims.find_entry(spread(&node.key()), |&at| at == slot) {
            entry.remove();
        }
    }

    fn adopt(&mut self, parent: u32, child: u32) {
        let first = self.arena.at(parent).below;
        let node = self.arena.at_mut(child);
        node.parent = parent;
        node.next = first;
        node.previous = NONE;
        if first != NONE {
            self.arena.at_mut(first).previous = child;
        }
        self.arena.at_mut(parent).below = child;
    }

    /// Take a node out of its parent's children. It still names its parent.
    fn unlink(&mut self, child: u32) {
        let Node { parent, next, previous, .. } = *self.arena.at(child);
        match previous {
            NONE if self.arena.at(parent).below == child => self.arena.at_mut(parent).below = next,
            NONE => {}
            _ => self.arena.at_mut(previous).next = next,
        }
        if next != NONE {
            self.arena.at_mut(next).previous = previous;
        }
    }

    fn children(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.arena.at(slot).below;
        std::iter::successors((first != NONE).then_some(first), |&at| {
            let next = self.arena.at(at).next;
            (next != NONE).then_some(next)
        })
    }

    fn keys(&self, slot: u32) -> Vec<Key> {
        let node = self.arena.at(slot);
        match self.odd.get(&slot) {
            _ if node.has(PLAIN) => vec![node.key()],
            Some(odd) => odd.keys.clone(),
            None => Vec::new(),
        }
    }

    fn each_key(&mut self, slot: u32, act: fn(&mut Self, Key, u32)) {
        let node = self.arena.at(slot);
        if node.has(PLAIN) {
            act(self, node.key(), slot);
        } else {
            self.keys(slot).into_iter().for_each(|key| act(self, key, slot));
        }
    }

    fn has_keys(&self, slot: u32) -> bool {
        self.arena.at(slot).has(PLAIN) || self.odd.get(&slot).is_some_and(|odd| !odd.keys.is_empty())
    }

    fn mark_slot(&mut self, slot: u32) {
        let node = self.arena.at_mut(slot);
        if !node.has(DIRTY) {
            node.set(DIRTY, true);
            self.dirty.push(slot);
        }
    }

    fn unhold_slot(&mut self, slot: u32, bit: u8) {
        let node = self.arena.at_mut(slot);
        if node.tiers & bit != 0 {
            node.tiers &= !bit;
            self.held -= usize::from(node.tiers == 0);
            self.mark_slot(slot);
        }
    }

    fn wanted(&self, slot: u32) -> u8 {
        let node = self.arena.at(slot);
        if node.tiers == 0 || node.has(OPAQUE) || !node.has(DIGEST) {
            return 0;
        }
        let through = if node.has(LACKING) { THROUGH } else { 0 };
        if node.parent == NONE {
            return node.tiers | through;
        }
        let mut above = self.arena.at(node.parent);
        if above.mask == 0 {
            return 0;
        }
        if !above.has(TAIL) || !self.has_keys(slot) {
            return node.tiers | through;
        }
        // Several engine pages make one index block: a tier holds it when it holds all of them.
        let (mut common, mut slowest) = (node.tiers, node.tiers & node.tiers.wrapping_neg());
        loop {
            common &= above.tiers;
            slowest = slowest.max(above.tiers & above.tiers.wrapping_neg());
            if above.parent == NONE || !self.arena.at(above.parent).has(TAIL) {
                break;
            }
            above = self.arena.at(above.parent);
        }
        (if common != 0 { common } else { slowest }) | through
    }

    /// The nodes at which an index block completes that this one, which completes none, is part of.
    fn completing(&self, slot: u32) -> Vec<u32> {
        let (mut found, mut todo) = (Vec::new(), vec![slot]);
        while let Some(page) = todo.pop() {
            for child in self.children(page) {
                if self.has_keys(child) {
                    found.push(child);
                } else {
                    todo.push(child);
                }
            }
        }
        found
    }

    fn attach(&mut self, slot: u32, met: &mut Vec<(u32, u8)>, todo: &mut Vec<u32>) {
        todo.push(slot);
        while let Some(slot) = todo.pop() {
            let wanted = self.wanted(slot);
            let node = self.arena.at_mut(slot);
            let was = node.mask;
            if wanted == was {
                continue;
            }
            if !node.has(MET) {
                node.set(MET, true);
                met.push((slot, was));
            }
            node.mask = wanted;
            if (wanted == 0) != (was == 0) {
                if wanted != 0 {
                    self.attached += 1;
                } else {
                    self.attached -= 1;
                }
                todo.extend(self.children(slot));
            } else if !self.has_keys(slot) {
                // A page without a key of its own still decides the tiers of the block it is part of.
                todo.extend(self.completing(slot));
            }
        }
    }

    fn claim(&mut self, key: Key, slot: u32) {
        let other = self.claimant(&key);
        if other == Some(slot) {
            return;
        }
        if let Some(other) = other {
            self.disown(other);
            self.contested.insert(key, vec![other]);
        } else if !self.contested.contains_key(&key) {
            if self.arena.at(slot).has(PLAIN) {
                self.own(slot);
            } else {
                self.contested.insert(key, vec![slot]);
            }
            return;
        }
        let owners = self.contested.entry(key).or_default();
        if !owners.contains(&slot) {
            owners.push(slot);
            self.contests += 1;
            self.ambiguous += usize::from(owners.len() == 2);
        }
    }

    fn disclaim(&mut self, key: Key, slot: u32) {
        let Some(owners) = self.contested.get_mut(&key) else {
            self.disown(slot);
            return;
        };
        let before = owners.len();
        owners.retain(|&owner| owner != slot);
        self.ambiguous -= usize::from(before == 2 && owners.len() == 1);
        if owners.is_empty() {
            self.contested.remove(&key);
        }
    }

    fn owner_slots(&self, key: &Key) -> Vec<u32> {
        match self.contested.get(key) {
            Some(owners) => owners.clone(),
            None => self.claimant(key).into_iter().collect(),
        }
    }

    /// What the index shows of one of a node's blocks. An engine reuses its own blocks whole: one that is wider than an
    /// index block is no hit for a prompt that leaves it half way.
    fn shown(&self, slot: u32, key: &Key) -> u8 {
        let node = self.arena.at(slot);
        let inside = !node.has(PLAIN) && self.odd.get(&slot).is_some_and(|odd| odd.keys.last() != Some(key));
        if node.mask != 0 && inside { node.mask | THROUGH } else { node.mask }
    }

    fn shown_of(&self, key: &Key) -> u8 {
        let Some(owners) = self.contested.get(key) else {
            return self.claimant(key).map_or(0, |slot| self.shown(slot, key));
        };
        if let [only] = owners[..] {
            return self.shown(only, key);
        }
        let (mut mask, mut through) = (0, THROUGH);
        for &slot in owners {
            let shown = self.shown(slot, key);
            mask |= shown;
            through &= shown;
        }
        mask & !THROUGH | through
    }

    fn write_out(&self, slot: u32, out: &mut Vec<u8>) {
        let node = self.arena.at(slot);
        let plain = [node.key()];
        let odd: &[Key] = self.odd.get(&slot).map_or(&[], |odd| &odd.keys);
        let keys = if node.has(PLAIN) { &plain } else { odd };
        let above = (node.parent != NONE).then(|| self.arena.at(node.parent));
        let mut head = above.filter(|above| above.has(HEAD)).map(|above| above.head);
        let mut parent = above.filter(|above| above.depth > 0 && above.has(DIGEST)).map(Node::key);
        let mut depth = node.depth - keys.len() as u32;
        for &key in keys {
            let page = head.filter(|_| depth % PAGE_SPAN != 0).unwrap_or(key);
            head = Some(page);
            let tiers = if node.has(OWNER) { node.mask } else { self.shown_of(&key) };
            Write { key, parent, head: page, depth, tiers }.pack(out);
            parent = Some(key);
            depth += 1;
        }
    }

    fn collect_slot(&mut self, mut slot: u32) {
        loop {
            let node = self.arena.at(slot);
            if node.tiers != 0 || node.below != NONE || !node.has(LIVE) {
                return;
            }
            let (hash, parent) = (node.hash, node.parent);
            if let Ok(entry) = self.names.find_entry(mix(hash), |&at| at == slot) {
                entry.remove();
            }
            self.arena.at_mut(slot).set(LIVE, false);
            self.dropped.push(slot);
            if parent == NONE {
                return;
            }
            self.unlink(slot);
            slot = parent;
        }
    }
}

/// One engine block of the full-attention group, as `Node` in consumers/blocks.py.
#[pyclass(name = "Node", module = "metatrie_native", frozen)]
pub struct Handle {
    table: Py<BlockTable>,
    slot: u32,
    birth: u32,
}

impl Handle {
    fn new(table: &Bound<'_, BlockTable>, slot: u32) -> PyResult<Py<Handle>> {
        let birth = table.borrow().arena.at(slot).birth;
        Py::new(table.py(), Handle { table: table.clone().unbind(), slot, birth })
    }

    fn all(table: &Bound<'_, BlockTable>, slots: impl IntoIterator<Item = u32>) -> PyResult<Vec<Py<Handle>>> {
        slots.into_iter().map(|slot| Handle::new(table, slot)).collect()
    }

    fn read<T>(&self, py: Python<'_>, ask: impl FnOnce(&BlockTable, &Node) -> T) -> PyResult<T> {
        let table = self.table.bind(py).borrow();
        Ok(ask(&table, table.arena.at(table.slot_of(self)?)))
    }

    fn change(&self, py: Python<'_>, flag: u16, on: bool) -> PyResult<()> {
        let mut table = self.table.bind(py).borrow_mut();
        let slot = table.slot_of(self)?;
        table.arena.at_mut(slot).set(flag, on);
        Ok(())
    }

    fn odd<T>(&self, py: Python<'_>, ask: impl FnOnce(&Odd) -> Option<T>) -> Option<T> {
        self.table.bind(py).borrow().odd.get(&self.slot).and_then(ask)
    }
}

impl BlockTable {
    /// Where the handle's node lives. Fails for one that is gone.
    fn slot_of(&self, handle: &Handle) -> PyResult<u32> {
        let chunk = self.arena.chunks.get(handle.slot as usize / CHUNK);
        match chunk.and_then(|chunk| chunk.get(handle.slot as usize % CHUNK)) {
            Some(node) if node.birth == handle.birth => Ok(handle.slot),
            _ => Err(PyReferenceError::new_err("the block is gone")),
        }
    }
}

#[pymethods]
impl Handle {
    #[getter]
    fn hash(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |_, node| node.hash)
    }

    #[getter]
    fn parent(&self, py: Python<'_>) -> PyResult<Option<Py<Handle>>> {
        let parent = self.read(py, |_, node| node.parent)?;
        if parent == NONE { Ok(None) } else { Handle::new(self.table.bind(py), parent).map(Some) }
    }

    #[getter]
    fn children(&self, py: Python<'_>) -> PyResult<Vec<Py<Handle>>> {
        let slots: Vec<u32> = self.read(py, |table, _| table.children(self.slot).collect())?;
        Handle::all(self.table.bind(py), slots)
    }

    #[getter]
    fn placed(&self, py: Python<'_>) -> PyResult<bool> {
        self.read(py, |_, node| node.has(PLACED))
    }

    #[getter]
    fn tiers(&self, py: Python<'_>) -> PyResult<u8> {
        self.read(py, |_, node| node.tiers)
    }

    #[getter]
    fn mask(&self, py: Python<'_>) -> PyResult<u8> {
        self.read(py, |_, node| node.mask)
    }

    #[getter]
    fn depth(&self, py: Python<'_>) -> PyResult<u32> {
        self.read(py, |_, node| node.depth)
    }

    #[getter]
    fn opaque(&self, py: Python<'_>) -> PyResult<bool> {
        self.read(py, |_, node| node.has(OPAQUE))
    }

    #[setter]
    fn set_opaque(&self, py: Python<'_>, opaque: bool) -> PyResult<()> {
        self.change(py, OPAQUE, opaque)
    }

    #[getter]
    fn lacking(&self, py: Python<'_>) -> PyResult<bool> {
        self.read(py, |_, node| node.has(LACKING))
    }

    #[setter]
    fn set_lacking(&self, py: Python<'_>, lacking: bool) -> PyResult<()> {
        self.change(py, LACKING, lacking)
    }

    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.read(py, |_, node| {
            node.has(DIGEST).then(|| PyBytes::new(py, if node.has(SHORT) { &node.digest[24..] } else { &node.digest }))
        })
    }

    #[getter]
    fn engine_digest<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        if self.read(py, |_, node| node.has(SAME))? {
            return self.digest(py);
        }
        Ok(self.odd(py, |odd| odd.engine_digest.as_ref().map(|digest| digest.bind(py).clone())))
    }

    #[getter]
    fn head<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.read(py, |_, node| node.has(HEAD).then(|| PyBytes::new(py, &node.head)))
    }

    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let keys = self.read(py, |table, _| table.keys(self.slot))?;
        PyTuple::new(py, keys.iter().map(|key| PyBytes::new(py, key)))
    }

    #[getter]
    fn tail(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.read(py, |_, _| ())?;
        Ok(self.odd(py, |odd| odd.tail.as_ref().map(|tail| tail.clone_ref(py))))
    }

    #[getter]
    fn pending(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.read(py, |_, _| ())?;
        Ok(self.odd(py, |odd| odd.pending.as_ref().map(|pending| pending.clone_ref(py))))
    }

    #[setter]
    fn set_pending(&self, py: Python<'_>, pending: Option<Py<PyAny>>) -> PyResult<()> {
        let mut table = self.table.bind(py).borrow_mut();
        let slot = table.slot_of(self)?;
        if pending.is_some() || table.odd.contains_key(&slot) {
            table.odd.entry(slot).or_default().pending = pending;
        }
        Ok(())
    }

    fn place(&self, py: Python<'_>, parent: Option<&Handle>) -> PyResult<()> {
        let mut table = self.table.bind(py).borrow_mut();
        let slot = table.slot_of(self)?;
        let above = parent.map(|parent| table.slot_of(parent)).transpose()?;
        if table.arena.at(slot).parent != NONE {
            table.unlink(slot);
            table.arena.at_mut(slot).parent = NONE;
        }
        table.arena.at_mut(slot).set(PLACED, true);
        if let Some(above) = above {
            table.adopt(above, slot);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn extend<'py>(
        &self,
        py: Python<'py>,
        digest: Option<&[u8]>,
        engine_digest: Option<Bound<'py, PyBytes>>,
        depth: u32,
        head: Option<&[u8]>,
        keys: Vec<Vec<u8>>,
        tail: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let wrong = || PyValueError::new_err("digest: 8 or 32 bytes; head and keys: 8 bytes; keys end with the digest's");
        let mut table = self.table.bind(py).borrow_mut();
        let slot = table.slot_of(self)?;
        if table.arena.at(slot).mask != 0 {
            return Err(PyValueError::new_err("it is attached"));
        }
        let keys: Vec<Key> =
            keys.iter().map(|key| key.as_slice().try_into()).collect::<Result<_, _>>().map_err(|_| wrong())?;
        let node = table.arena.at_mut(slot);
        node.flags &= !(DIGEST | SHORT | SAME | HEAD | PLAIN | TAIL);
        node.digest = [0; 32];
        if let Some(digest) = digest {
            if digest.len() != 8 && digest.len() != 32 {
                return Err(wrong());
            }
            node.digest[32 - digest.len()..].copy_from_slice(digest);
            node.set(DIGEST, true);
            node.set(SHORT, digest.len() == 8);
        }
        if let Some(head) = head {
            node.head = head.try_into().map_err(|_| wrong())?;
            node.set(HEAD, true);
        }
        if keys.len() > depth as usize || keys.last().is_some_and(|key| *key != node.key()) {
            return Err(wrong());
        }
        node.depth = depth;
        node.set(PLAIN, keys.len() == 1);
        node.set(TAIL, tail.is_some());
        let same = engine_digest.is_some() && digest == engine_digest.as_ref().map(|digest| digest.as_bytes());
        node.set(SAME, same);
        let pending = table.odd.remove(&slot).and_then(|odd| odd.pending);
        let odd = Odd {
            keys: if keys.len() == 1 { Vec::new() } else { keys },
            engine_digest: engine_digest.filter(|_| !same).map(Bound::unbind),
            tail,
            pending,
        };
        if !odd.keys.is_empty() || odd.engine_digest.is_some() || odd.tail.is_some() || odd.pending.is_some() {
            table.odd.insert(slot, odd);
        }
        Ok(())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Handle>().is_ok_and(|other| {
            let other = other.get();
            (self.slot, self.birth) == (other.slot, other.birth) && self.table.is(&other.table)
        })
    }

    fn __hash__(&self) -> u64 {
        u64::from(self.birth)
    }
}

#[pymethods]
impl BlockTable {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.names.len()
    }

    #[getter]
    fn index_blocks(&self) -> usize {
        self.named + self.claims.len() + self.contested.len()
    }

    fn nodes(slf: &Bound<'_, Self>) -> PyResult<Vec<Py<Handle>>> {
        let slots: Vec<u32> =
            slf.borrow().arena.slots().filter(|(_, node)| node.has(LIVE)).map(|(slot, _)| slot).collect();
        Handle::all(slf, slots)
    }

    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let none = || py.None().into_bound(py);
        let states = self.arena.slots().filter(|(_, node)| node.has(LIVE)).map(|(slot, node)| {
            let odd = self.odd.get(&slot);
            let digest = if node.has(SHORT) { &node.digest[24..] } else { &node.digest };
            let digest = if node.has(DIGEST) { PyBytes::new(py, digest).into_any() } else { none() };
            let engine_digest = match odd.and_then(|odd| odd.engine_digest.as_ref()) {
                _ if node.has(SAME) => digest.clone(),
                Some(own) => own.bind(py).clone().into_any(),
                None => none(),
            };
            let value = |value: Option<&Py<PyAny>>| value.map_or_else(none, |value| value.bind(py).clone());
            let parent = (node.parent != NONE).then(|| self.arena.at(node.parent).hash);
            let keys = if node.has(PLAIN) {
                PyTuple::new(py, [PyBytes::new(py, &node.digest[24..])])?
            } else {
                PyTuple::new(py, self.keys(slot).iter().map(|key| PyBytes::new(py, key)))?
            };
            let fields = [
                node.hash.into_pyobject(py)?.into_any(),
                parent.into_pyobject(py)?,
                node.has(PLACED).into_pyobject(py)?.to_owned().into_any(),
                node.tiers.into_pyobject(py)?.into_any(),
                digest,
                engine_digest,
                node.depth.into_pyobject(py)?.into_any(),
                if node.has(HEAD) { PyBytes::new(py, &node.head).into_any() } else { none() },
                keys.into_any(),
                value(odd.and_then(|odd| odd.tail.as_ref())),
                value(odd.and_then(|odd| odd.pending.as_ref())),
                node.has(OPAQUE).into_pyobject(py)?.to_owned().into_any(),
            ];
            PyTuple::new(py, fields)
        });
        PyList::new(py, states.collect::<PyResult<Vec<_>>>()?)
    }

    fn get(slf: &Bound<'_, Self>, hash: u64) -> PyResult<Option<Py<Handle>>> {
        let found = slf.borrow().find(hash);
        found.map(|slot| Handle::new(slf, slot)).transpose()
    }

    fn node(slf: &Bound<'_, Self>, hash: u64) -> PyResult<Py<Handle>> {
        let found = slf.borrow().find(hash);
        let slot = found.unwrap_or_else(|| {
            slf.borrow_mut().create(Node {
                hash,
                digest: [0; 32],
                head: [0; 8],
                depth: 0,
                parent: NONE,
                below: NONE,
                next: NONE,
                previous: NONE,
                birth: 0,
                flags: 0,
                tiers: 0,
                mask: 0,
            })
        });
        Handle::new(slf, slot)
    }

    fn mark(&mut self, node: &Handle) -> PyResult<()> {
        let slot = self.slot_of(node)?;
        self.mark_slot(slot);
        Ok(())
    }

    fn hold(&mut self, node: &Handle, bit: u8) -> PyResult<()> {
        let slot = self.slot_of(node)?;
        let node = self.arena.at_mut(slot);
        if node.tiers & bit != bit {
            self.held += usize::from(node.tiers == 0);
            node.tiers |= bit;
            self.mark_slot(slot);
        }
        Ok(())
    }

    fn unhold(&mut self, node: &Handle, bit: u8) -> PyResult<()> {
        let slot = self.slot_of(node)?;
        self.unhold_slot(slot, bit);
        Ok(())
    }

    fn collect(&mut self, node: &Handle) -> PyResult<()> {
        let slot = self.slot_of(node)?;
        self.collect_slot(slot);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn store(
        &mut self,
        copies: &mut Copies,
        hashes: Vec<u64>,
        tokens: &[u8],
        block_size: usize,
        parent: Option<u64>,
        root: &[u8],
        bit: u8,
        predicted: bool,
    ) -> PyResult<bool> {
        let width = 4 * block_size;
        if hashes.is_empty() || tokens.len() != width * hashes.len() {
            return Ok(false);
        }
        let mut above = NONE;
        let mut hash: chain::Hash = root.try_into().map_err(|_| PyValueError::new_err("root: 32 bytes"))?;
        let (mut depth, mut head, mut before) = (0, None, None);
        if let Some(parent) = parent {
            let Some(slot) = self.find(parent) else { return Ok(false) };
            let node = self.arena.at(slot);
            let odd = node.flags & (DIRTY | SHORT | TAIL) != 0 || !node.has(DIGEST) || (predicted && !node.has(SAME));
            if odd || node.mask == 0 || node.tiers == 0 {
                return Ok(false);
            }
            (above, hash, depth) = (slot, node.digest, node.depth);
            head = node.has(HEAD).then_some(node.head);
            before = Some(node.key());
        }
        if hashes.iter().any(|&name| self.find(name).is_some() || copies.contains(name)) {
            return Ok(false);
        }
        let mut hasher = chain::Hasher::default();
        let mut digests: Vec<chain::Hash> = Vec::with_capacity(hashes.len());
        for (name, block) in hashes.iter().zip(tokens.chunks_exact(width)) {
            hash = hasher.block(&hash, block, None);
            let key: Key = hash[24..].try_into().unwrap();
            if predicted && u64::from_be_bytes(key) != *name {
                return Ok(false);
            }
            if self.claimant(&key).is_some() || (!self.contested.is_empty() && self.contested.contains_key(&key)) {
                return Ok(false);
            }
            digests.push(hash);
        }
        if !predicted || hashes.len() > 1 {
            let mut sorted = hashes.clone();
            sorted.sort_unstable();
            if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
                return Ok(false);
            }
        }
        for (&name, digest) in hashes.iter().zip(digests) {
            let key: Key = digest[24..].try_into().unwrap();
            let page = head.filter(|_| depth % PAGE_SPAN != 0).unwrap_or(key);
            head = Some(page);
            Write { key, parent: before, head: page, depth, tiers: bit }.pack(&mut self.emitted);
            depth += 1;
            let slot = self.create(Node {
                hash: name,
                digest,
                head: page,
                depth,
                parent: NONE,
                below: NONE,
                next: NONE,
                previous: NONE,
                birth: 0,
                flags: DIGEST | HEAD | PLAIN | PLACED | if predicted { SAME } else { 0 },
                tiers: bit,
                mask: bit,
            });
            self.own(slot);
            if above != NONE {
                self.adopt(above, slot);
            }
            copies.append(name, 1);
            (above, before) = (slot, Some(key));
        }
        self.held += hashes.len();
        self.attached += hashes.len();
        Ok(true)
    }

    fn remove(&mut self, copies: &mut Copies, hashes: Vec<u64>, bit: u8) -> usize {
        let mut unknown = 0;
        for hash in hashes {
            match copies.take_one(hash) {
                None => unknown += 1,
                Some(0) => {
                    if let Some(slot) = self.find(hash) {
                        self.unhold_slot(slot, bit);
                    }
                }
                Some(_) => {}
            }
        }
        unknown
    }

    fn settle<'py>(
        slf: &Bound<'py, Self>,
        report: bool,
    ) -> PyResult<(Bound<'py, PyBytes>, u32, Vec<Py<Handle>>)> {
        let py = slf.py();
        let (writes, contests) = slf.borrow_mut().settled(py);
        let gone = if report { Handle::all(slf, slf.borrow().dropped.iter().copied())? } else { Vec::new() };
        let mut table = slf.borrow_mut();
        for slot in std::mem::take(&mut table.dropped) {
            table.odd.remove(&slot);
            let node = table.arena.at_mut(slot);
            node.birth = 0; // no handle has it
            table.arena.free.push(slot);
        }
        Ok((writes, contests, gone))
    }

    fn owners(slf: &Bound<'_, Self>, key: &[u8]) -> PyResult<Vec<Py<Handle>>> {
        let Ok(key) = key.try_into() else { return Ok(Vec::new()) };
        let slots = slf.borrow().owner_slots(&key);
        Handle::all(slf, slots)
    }

    fn shows(&self, key: &[u8]) -> u8 {
        key.try_into().map_or(0, |key| self.shown_of(&key))
    }

    #[pyo3(signature = (start=0, step=1))]
    fn index_keys<'py>(&self, py: Python<'py>, start: usize, step: usize) -> PyResult<Bound<'py, PyList>> {
        let plain = self.arena.slots().filter(|(_, node)| node.has(PLAIN | LIVE) && node.mask != 0).map(|(_, n)| n.key());
        let plain = plain.filter(|key| self.contested.is_empty() || !self.contested.contains_key(key));
        let keys = plain.chain(self.contested.keys().copied()).skip(start).step_by(step.max(1));
        PyList::new(py, keys.map(|key| PyBytes::new(py, &key)).collect::<Vec<_>>())
    }

    fn attached_writes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut out = Vec::with_capacity(writes::SIZE * self.index_blocks());
        for (slot, node) in self.arena.slots() {
            if node.mask != 0 && node.has(LIVE) {
                self.write_out(slot, &mut out);
            }
        }
        PyBytes::new(py, &if self.contested.is_empty() { out } else { writes::newest(&[&out]).concat() })
    }

    fn clear(&mut self) {
        let births = self.births;
        *self = Self { births, ..Self::default() };
    }
}

impl BlockTable {
    /// Bring attachment up to date. Returns what the index must be told, and how often a key was claimed anew.
    fn settled<'py>(&mut self, py: Python<'py>) -> (Bound<'py, PyBytes>, u32) {
        let dirty = std::mem::take(&mut self.dirty);
        let mut met: Vec<(u32, u8)> = Vec::with_capacity(dirty.len());
        let mut todo = Vec::new();
        for &slot in &dirty {
            self.arena.at_mut(slot).set(DIRTY, false);
            self.attach(slot, &mut met, &mut todo);
        }
        let mut out = std::mem::take(&mut self.emitted);
        let before = out.len();
        let (mut came, mut went, contested) = (false, false, !self.contested.is_empty());
        met.retain(|&(slot, was)| {
            let node = self.arena.at_mut(slot);
            node.set(MET, false);
            node.mask != was
        });
        // What goes gives up its keys first, so that nobody who takes one over is thought to share it.
        for &(slot, _) in &met {
            if self.arena.at(slot).mask == 0 {
                went = true;
                self.each_key(slot, Self::disclaim);
            }
        }
        for &(slot, was) in &met {
            if was == 0 {
                came = true;
                self.each_key(slot, Self::claim);
            }
        }
        for &(slot, _) in &met {
            self.write_out(slot, &mut out);
        }
        // Two of them can name the same block only where one came and another went, or both are or were there.
        let several = contested || !self.contested.is_empty();
        let repeats = out.len() > before && (before > 0 || (came && went) || several);
        for slot in dirty {
            if self.arena.at(slot).tiers == 0 {
                self.collect_slot(slot);
            }
        }
        let contests = std::mem::take(&mut self.contests);
        let packed = if repeats {
            PyBytes::new(py, &writes::newest(&[&out]).concat())
        } else {
            PyBytes::new(py, &out)
        };
        out.clear();
        out.shrink_to(1 << 16);
        self.emitted = out;
        (packed, contests)
    }
}
