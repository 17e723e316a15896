//! The stream that `torch.save` wrote before PyTorch 1.6, and still writes with
//! `_use_new_zipfile_serialization=False`: five pickles, then the storages.

use std::collections::HashSet;
use std::ops::Range;

use bytes::Bytes;
use dcp_core::{CheckpointError, FormatError};
use indexmap::IndexMap;

use super::contents::{Contents, LIMITS};
use super::file::File;
use crate::pickle::{Node, NodeId, Pickle, Writer};
use crate::torch_tensor::{ByteOrder, stored};
use crate::torch_zip::{Method, ParseStep, Record, Sparse};

/// The magic number at the start of the stream, pickled with each protocol. PyTorch writes the
/// first one unless `pickle_protocol` is set, and refuses protocol 0.
const MAGICS: [&[u8]; 5] = [
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
    b"L119547037146038801333356L\n.",
    b"\x80\x03\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
    b"\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
    b"\x80\x05\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
];
/// The only version of the stream.
pub(super) const PROTOCOL: i64 = 1001;
/// Bytes of the element count that precedes each storage.
pub(super) const COUNT_LEN: u64 = 8;
/// The size of the first read, before the length of the pickles is known.
const FIRST: u64 = 64 << 10;
/// The maximum size of all five pickles, in bytes.
const PICKLES_MAX: u64 = 256 << 20;

pub(super) fn is_magic(head: &[u8]) -> bool {
    magic_len(head).is_some()
}

/// Whether a file that is `head` alone ends within the magic number.
pub(super) fn ends_in_magic(head: &[u8]) -> bool {
    let is_part = |magic: &&[u8]| magic.starts_with(head) && magic.len() > head.len();
    !head.is_empty() && MAGICS.iter().any(is_part)
}

/// The end of the magic number's pickle.
fn magic_len(head: &[u8]) -> Option<usize> {
    MAGICS.iter().find(|magic| head.starts_with(magic)).map(|magic| magic.len())
}

/// The five pickles.
struct Stream {
    /// The pickle of the object.
    object: Range<u64>,
    /// The keys of the storages, in file order.
    keys: Vec<Box<str>>,
    /// The offset of the first storage.
    end: u64,
}

pub(super) async fn read(file: &mut File<'_>) -> Result<Contents, CheckpointError> {
    let len = file.byte_len();
    let stream = file.parse(PICKLES_MAX, |blob| parse(blob, len)).await?;
    let range = stream.object.clone();
    let known = file.scattered(std::slice::from_ref(&range)).await?;
    let pickle = known.into_iter().next().unwrap_or_default();
    file.forget();
    let places = places(&pickle, &stream, len).map_err(|error| file.locate(error))?;
    let counts: Vec<_> = places.iter().map(|place| place.count_at..place.data.start).collect();
    let counts = file.scattered(&counts).await?;
    let mut storages = IndexMap::new();
    for ((key, place), count) in stream.keys.into_iter().zip(places).zip(counts) {
        let found = count.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if found != place.elements {
            let expected = place.elements;
            let problem =
                format!("storage {key:?} has {found} elements, the pickle says {expected}");
            let error = FormatError::new("torch.save file", problem).at(place.count_at);
            return Err(file.locate(error).into());
        }
        let byte_len = place.data.end - place.data.start;
        let record = Record { data: place.data, byte_len, crc32: None, method: Method::Stored };
        storages.insert(key, record);
    }
    Ok(Contents {
        pickle,
        pickle_range: range,
        // On a big-endian machine, PyTorch swaps the bytes of these storages when it writes and
        // when it reads; the machine's byte order in the stream has no effect.
        byte_order: ByteOrder::Little,
        storages,
        records: IndexMap::new(),
        version: Some(PROTOCOL.to_string().into()),
        trailing: 0,
    })
}

/// Parses the pickles, from the first bytes of the file. Their length is not known in advance.
fn parse(blob: &Sparse<'_>, file_len: u64) -> Result<ParseStep<Stream>, FormatError> {
    let most = file_len.min(PICKLES_MAX);
    let mut len = FIRST.min(most);
    // The longest part in memory is the last one that was requested.
    while let Some(longer) = Some(len.saturating_mul(4).min(most)).filter(|next| *next > len)
        && blob.get(0..longer).is_some()
    {
        len = longer;
    }
    let Some(head) = blob.get(0..len) else { return Ok(ParseStep::Need(0..len)) };
    match pickles(head) {
        Ok(stream) => Ok(ParseStep::Ready(stream)),
        // The part may be cut off, which no error distinguishes from damage.
        Err(_) if len < most => Ok(ParseStep::Need(0..len.saturating_mul(4).min(most))),
        Err(error) => Err(error),
    }
}

fn pickles(head: &[u8]) -> Result<Stream, FormatError> {
    let mut at = magic_len(head).unwrap_or(0);
    let mut next = |input: &mut usize| -> Result<Pickle<'_>, FormatError> {
        let rest = head.get(at..).unwrap_or_default();
        let pickle = Pickle::parse(rest, &LIMITS).map_err(|error| {
            let within = error.byte_offset().unwrap_or(0);
            FormatError::new("torch.save file", error.problem()).at(at as u64 + within)
        })?;
        *input = at;
        at += pickle.byte_len();
        Ok(pickle)
    };
    let mut start = 0;
    let bad = |problem: &str, at: usize| FormatError::new("torch.save file", problem).at(at as u64);
    let protocol = next(&mut start)?;
    if protocol.int(protocol.root()) != Some(PROTOCOL) {
        return Err(bad("it is of an unknown version", start));
    }
    // Facts about the machine, which have no effect on the rest.
    let machine = next(&mut start)?;
    if let Some(name) = machine.foreign_names().first().or(protocol.foreign_names().first()) {
        let problem = format!("what it notes of the machine that wrote it names {name}");
        return Err(bad(&problem, start));
    }
    let object = next(&mut start)?;
    let object = start as u64..(start + object.byte_len()) as u64;
    let keys = next(&mut start)?;
    let end = (start + keys.byte_len()) as u64;
    let keys = match keys.node(keys.root()) {
        Node::List(span) => {
            keys.children(*span).iter().map(|id| keys.str(*id).map(Box::from)).collect()
        }
        _ => None,
    };
    let keys: Vec<Box<str>> = keys.ok_or_else(|| bad("it has no list of storages", start))?;
    Ok(Stream { object, keys, end })
}

/// The expected position of a storage.
struct Place {
    count_at: u64,
    elements: u64,
    data: Range<u64>,
}

/// The positions of the storages, from the lengths in the pickle.
fn places(pickle: &[u8], stream: &Stream, file_len: u64) -> Result<Vec<Place>, FormatError> {
    let pickle = Pickle::parse(pickle, &LIMITS)?;
    let mut known = IndexMap::new();
    for index in 0..pickle.node_count() {
        if let Some(id) = NodeId::from_index(index)
            && let Some((storage, element)) = stored(&pickle, id)
        {
            known.insert(storage.key, (storage.byte_len, element));
        }
    }
    let mut at = stream.end;
    let mut places = Vec::new();
    let mut seen = HashSet::new();
    for key in &stream.keys {
        let bad = |problem: String| FormatError::new("torch.save file", problem).at(at);
        if !seen.insert(key) {
            return Err(bad(format!("storage {key:?} is listed twice")));
        }
        let Some((byte_len, element)) = known.get(key) else {
            return Err(bad(format!("storage {key:?} is listed, but no tensor is in it")));
        };
        let data = at.checked_add(COUNT_LEN).and_then(|start| {
            let end = start.checked_add(*byte_len)?;
            (end <= file_len).then_some(start..end)
        });
        let Some(data) = data else {
            let problem = format!(
                "storage {key:?} should have {byte_len} bytes, the file ends before: it is cut short"
            );
            return Err(bad(problem));
        };
        let elements = byte_len / element;
        places.push(Place { count_at: at, elements, data: data.clone() });
        at = data.end;
    }
    Ok(places)
}

/// Everything before the storages: magic number, version, facts about the machine, the object, and
/// the keys of `count` storages, which are their numbers in `width` digits.
pub(super) fn head(object: &[u8], count: usize, width: usize) -> Result<Bytes, FormatError> {
    let mut head = MAGICS[0].to_vec();
    let mut protocol = Writer::new();
    protocol.int(PROTOCOL);
    head.extend_from_slice(&protocol.finish()?);
    let mut system = Writer::new();
    let sizes = [("short", 2), ("int", 4), ("long", 4)];
    system.dict([0, 1, 2].into_iter(), |system, entry| {
        match entry {
            0 => {
                system.constant("protocol_version");
                system.int(PROTOCOL);
            }
            1 => {
                system.constant("little_endian");
                system.bool(true);
            }
            _ => {
                system.constant("type_sizes");
                system.dict(sizes.into_iter(), |system, (name, size)| {
                    system.constant(name);
                    system.int(size);
                    Ok::<(), FormatError>(())
                })?;
            }
        }
        Ok::<(), FormatError>(())
    })?;
    head.extend_from_slice(&system.finish()?);
    head.extend_from_slice(object);
    let mut keys = Writer::new();
    keys.list(0..count, |keys, number| {
        keys.str(&format!("{number:0width$}"));
        Ok::<(), FormatError>(())
    })?;
    head.extend_from_slice(&keys.finish()?);
    Ok(head.into())
}
