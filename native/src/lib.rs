//! Optional kernel of metatrie. Every function here has a pure Python twin that gives the same answers, and the same
//! tests run over both; `metatrie/proto/native.py` chooses at import.

mod blocks;
mod chain;
mod copies;
mod events;
mod holdings;
mod memo;
mod prompt;
mod writes;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

/// What `proto/native.py` expects; changes with every change of a signature.
const INTERFACE: u32 = 11;

/// Cut the `token_ids` of a JSON object out: (packed little-endian u32, the document with `[0]` in their place), or
/// None where the document must be decoded the ordinary way.
#[pyfunction]
fn split_token_ids<'py>(
    py: Python<'py>,
    doc: &[u8],
    max_tokens: usize,
) -> Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let found = prompt::split(doc, max_tokens)?;
    let rest = [&doc[..found.start], prompt::PLACEHOLDER, &doc[found.stop..]].concat();
    Some((PyBytes::new(py, &found.tokens), PyBytes::new(py, &rest)))
}

/// Hashes of spans seen before, for `extend_chain`; see `memo`.
#[pyclass]
struct SpanMemo(memo::Memo);

#[pymethods]
impl SpanMemo {
    #[new]
    fn new(capacity: usize) -> Self {
        SpanMemo(memo::Memo::new(capacity))
    }
}

/// Hash consecutive blocks below `parent` and append their 8-byte keys to `keys`. Returns the last block's hash.
///
/// tokens: packed little-endian u32, a whole number of blocks. extras: CBOR of each block's extra keys (None where it
/// has none), or None when no block has any; only then spans are looked up in `memo` and kept there.
#[pyfunction]
#[pyo3(signature = (parent, tokens, block_size, keys, extras=None, memo=None))]
fn extend_chain<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: &[u8],
    block_size: usize,
    keys: &Bound<'py, PyList>,
    extras: Option<Vec<Option<Bound<'py, PyBytes>>>>,
    mut memo: Option<PyRefMut<'py, SpanMemo>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut hash: chain::Hash = parent.try_into().map_err(|_| PyValueError::new_err("parent: 32 bytes"))?;
    let width = 4 * block_size;
    if width == 0 || tokens.len() % width != 0 {
        return Err(PyValueError::new_err("tokens: a whole number of blocks"));
    }
    if extras.as_ref().is_some_and(|e| e.len() != tokens.len() / width) {
        return Err(PyValueError::new_err("extras: one per block"));
    }
    let mut hasher = chain::Hasher::default();
    let append = |key: &[u8]| keys.append(PyBytes::new(py, key));
    for (s, span) in tokens.chunks(width * memo::SPAN).enumerate() {
        let whole = span.len() == width * memo::SPAN && extras.is_none();
        let name = match &memo {
            Some(memo) if whole => Some(memo.0.name(&hash, span)),
            _ => None,
        };
        if let (Some(name), Some(memo)) = (name, memo.as_mut()) {
            if let Some(known) = memo.0.get(name) {
                known.keys.chunks_exact(memo::KEY_BYTES).try_for_each(append)?;
                hash = known.last;
                continue;
            }
        }
        let mut flat = [0u8; memo::SPAN * memo::KEY_BYTES];
        for (i, block) in span.chunks_exact(width).enumerate() {
            let extra = extras.as_ref().and_then(|e| e[s * memo::SPAN + i].as_ref()).map(|e| e.as_bytes());
            hash = hasher.block(&hash, block, extra);
            append(&hash[32 - memo::KEY_BYTES..])?;
            flat[i * memo::KEY_BYTES..][..memo::KEY_BYTES].copy_from_slice(&hash[32 - memo::KEY_BYTES..]);
        }
        if let (Some(name), Some(memo)) = (name, memo.as_mut()) {
            memo.0.put(name, Box::new(memo::Span { keys: flat, last: hash }));
        }
    }
    Ok(PyBytes::new(py, &hash))
}

/// Hashes of consecutive blocks below `parent`, none with extra keys. tokens: as above.
#[pyfunction]
fn chain_hashes<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: &[u8],
    block_size: usize,
) -> PyResult<Bound<'py, PyList>> {
    let mut hash: chain::Hash = parent.try_into().map_err(|_| PyValueError::new_err("parent: 32 bytes"))?;
    let width = 4 * block_size;
    if width == 0 || tokens.len() % width != 0 {
        return Err(PyValueError::new_err("tokens: a whole number of blocks"));
    }
    let mut hasher = chain::Hasher::default();
    let hashes = tokens.chunks_exact(width).map(|block| {
        hash = hasher.block(&hash, block, None);
        PyBytes::new(py, &hash)
    });
    PyList::new(py, hashes.collect::<Vec<_>>())
}

/// A msgpack event batch with each array of token ids as one extension value of packed little-endian u32, or None where
/// it must be decoded as it is.
#[pyfunction]
fn pack_token_ids<'py>(py: Python<'py>, batch: &[u8]) -> Option<Bound<'py, PyBytes>> {
    events::pack(batch).map(|packed| PyBytes::new(py, &packed))
}

/// A msgpack event batch of nothing but plain blocks: (timestamp, rank, events), each event a tuple of its fields in the
/// order of `plain_batch` in proto/native.py; None for any other batch.
#[pyfunction]
fn plain_batch<'py>(py: Python<'py>, batch: &[u8]) -> PyResult<Option<Bound<'py, PyTuple>>> {
    use events::Event::{Cleared, Removed, Stored};
    let Some(batch) = events::plain(batch) else { return Ok(None) };
    let events = batch.events.into_iter().map(|event| match event {
        Stored { hashes, parent, tokens, block_size, medium, group, kind } => {
            (hashes, medium, group, parent, PyBytes::new(py, &tokens), block_size, kind).into_pyobject(py)
        }
        Removed { hashes, medium, group } => (hashes, medium, group).into_pyobject(py),
        Cleared => Ok(PyTuple::empty(py)),
    });
    let events = PyList::new(py, events.collect::<PyResult<Vec<_>>>()?)?;
    Ok(Some((batch.ts, batch.rank, events).into_pyobject(py)?))
}

/// The newest state of every block in these packed writes, in the order an index wants them; see `writes`.
#[pyfunction]
fn merge_writes<'py>(py: Python<'py>, parts: Vec<Bound<'py, PyBytes>>) -> Bound<'py, PyBytes> {
    let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    PyBytes::new(py, &writes::merge(&parts))
}

/// Per page of these packed writes, in the order they first occur: its head, and its writes.
#[pyfunction]
fn pages_of_writes<'py>(py: Python<'py>, raw: &[u8]) -> PyResult<Bound<'py, PyList>> {
    let pages = writes::pages(raw);
    PyList::new(py, pages.iter().map(|(head, writes)| (PyBytes::new(py, head), PyBytes::new(py, writes))))
}

/// Per page of these packed writes, in the order they first occur: its head, and key and tiers of each block.
#[pyfunction]
fn writes_by_page<'py>(py: Python<'py>, raw: &[u8]) -> PyResult<Bound<'py, PyList>> {
    let pages = writes::by_page(raw);
    PyList::new(py, pages.iter().map(|(head, entries)| (PyBytes::new(py, head), PyBytes::new(py, entries))))
}

#[pymodule]
fn metatrie_native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("INTERFACE", INTERFACE)?;
    m.add_class::<SpanMemo>()?;
    m.add_class::<blocks::BlockTable>()?;
    m.add_class::<copies::Copies>()?;
    m.add_class::<holdings::Holdings>()?;
    m.add_function(wrap_pyfunction!(split_token_ids, m)?)?;
    m.add_function(wrap_pyfunction!(extend_chain, m)?)?;
    m.add_function(wrap_pyfunction!(chain_hashes, m)?)?;
    m.add_function(wrap_pyfunction!(pack_token_ids, m)?)?;
    m.add_function(wrap_pyfunction!(plain_batch, m)?)?;
    m.add_function(wrap_pyfunction!(merge_writes, m)?)?;
    m.add_function(wrap_pyfunction!(writes_by_page, m)?)?;
    m.add_function(wrap_pyfunction!(pages_of_writes, m)?)?;
    Ok(())
}
