//! Copies by engine hash, in the order the blocks came: twin of `Copies` in consumers/blocks.py, which is a dict.
//!
//! Entries lie in a list, found through a table of places. What was removed leaves a gap (no copies); when gaps are
//! the larger part, the list is written anew.

use crate::writes::mix;
use hashbrown::HashTable;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

#[pyclass(module = "metatrie_native", mapping)]
#[derive(Default)]
pub struct Copies {
    hashes: Vec<u64>,
    counts: Vec<u32>,
    places: HashTable<u32>,
    /// Everything before it is gaps.
    first: usize,
}

impl Copies {
    fn place(&self, hash: u64) -> Option<usize> {
        self.places.find(mix(hash), |&at| self.hashes[at as usize] == hash).map(|&at| at as usize)
    }

    pub fn contains(&self, hash: u64) -> bool {
        self.place(hash).is_some()
    }

    /// Add a block that has no entry.
    pub fn append(&mut self, hash: u64, count: u32) {
        let hashes = &self.hashes;
        self.places.insert_unique(mix(hash), hashes.len() as u32, |&at| mix(hashes[at as usize]));
        self.hashes.push(hash);
        self.counts.push(count);
    }

    /// One copy less: how many are left; None if there was none.
    pub fn take_one(&mut self, hash: u64) -> Option<u32> {
        let at = self.place(hash)?;
        if self.counts[at] == 1 {
            return self.forget(hash).map(|_| 0);
        }
        self.counts[at] -= 1;
        Some(self.counts[at])
    }

    fn forget(&mut self, hash: u64) -> Option<u32> {
        let hashes = &self.hashes;
        let entry = self.places.find_entry(mix(hash), |&at| hashes[at as usize] == hash).ok()?;
        let (at, _) = entry.remove();
        let count = std::mem::take(&mut self.counts[at as usize]);
        while self.counts.get(self.first) == Some(&0) {
            self.first += 1;
        }
        if self.hashes.len() > 64 && self.places.len() < self.hashes.len() / 2 {
            self.close_gaps();
        }
        Some(count)
    }

    fn close_gaps(&mut self) {
        let entries: Vec<(u64, u32)> = self.entries().collect();
        (self.hashes, self.counts) = entries.into_iter().unzip();
        self.first = 0;
        self.places.clear();
        let hashes = &self.hashes;
        for (at, &hash) in hashes.iter().enumerate() {
            self.places.insert_unique(mix(hash), at as u32, |&at| mix(hashes[at as usize]));
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let all = self.hashes.iter().copied().zip(self.counts.iter().copied());
        all.skip(self.first).filter(|&(_, count)| count > 0)
    }
}

#[pymethods]
impl Copies {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.places.len()
    }

    fn __contains__(&self, hash: u64) -> bool {
        self.contains(hash)
    }

    fn __getitem__(&self, hash: u64) -> PyResult<u32> {
        self.place(hash).map(|at| self.counts[at]).ok_or_else(|| PyKeyError::new_err(hash))
    }

    fn __setitem__(&mut self, hash: u64, count: u32) {
        match self.place(hash) {
            Some(at) => self.counts[at] = count,
            None => self.append(hash, count),
        }
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.keys(py)?.try_iter()?.into_any())
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let ours = PyDict::new(py);
        for (hash, count) in self.entries() {
            ours.set_item(hash, count)?;
        }
        if let Ok(other) = other.cast::<Copies>() {
            let other = other.borrow();
            return Ok(self.places.len() == other.places.len()
                && self.entries().all(|(hash, count)| other.place(hash).is_some_and(|at| other.counts[at] == count)));
        }
        ours.eq(other)
    }

    #[pyo3(signature = (hash, default=None))]
    fn get(&self, py: Python<'_>, hash: u64, default: Option<Py<PyAny>>) -> PyResult<Option<Py<PyAny>>> {
        match self.place(hash) {
            Some(at) => Ok(Some(self.counts[at].into_pyobject(py)?.into_any().unbind())),
            None => Ok(default),
        }
    }

    fn drop(&mut self, hash: u64) -> u32 {
        self.forget(hash).unwrap_or(0)
    }

    fn oldest(&self) -> PyResult<u64> {
        self.hashes.get(self.first).copied().ok_or_else(|| PyKeyError::new_err("it is empty"))
    }

    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.entries().map(|(hash, _)| hash).collect::<Vec<_>>())
    }

    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.entries().map(|(_, count)| count).collect::<Vec<_>>())
    }

    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.entries().collect::<Vec<_>>())
    }
}
