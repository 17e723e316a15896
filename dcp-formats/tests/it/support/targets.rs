//! What each fuzz target does with its input; also run on the seeds by an ordinary test.

#![allow(dead_code, unreachable_pub, reason = "each fuzz target uses one of them")]

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::format::{Listing, WantedKeys};
use dcp_core::metadata::{Entry, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, SavePlan, WritePlan};
use dcp_core::storage::ObjectMeta;
use dcp_core::wire::{MessageReader, MessageWriter, PlanRequest, PlanSummary};
use dcp_core::{CheckpointMetadata, FormatError, Key, PlanError, Value};
use dcp_formats::dcp::Sidecar;
use dcp_formats::hf::IndexFile;
use dcp_formats::metadata::{
    Decoded, Profile, check_chunks, decode_all, decode_parsed, decode_selected, encode,
};
use dcp_formats::pickle::{Converter, Limits, NodeId, PersistentSink, Pickle, Writer, dump};
use dcp_formats::safetensors::{Header, PREFIX_LEN, ShardingInfo, header_len};
use dcp_formats::torch_object::{decode_object, encode_object};
use dcp_formats::torch_tensor::TensorBlob;
use dcp_formats::torch_zip::{ArchiveIndex, ParseStep, Sparse};
use dcp_formats::zarr::ArrayHeader;

pub fn pickle(bytes: &[u8]) {
    if let Ok(pickle) = Pickle::parse(bytes, &Limits::DEFAULT) {
        assert!(pickle.foreign_names().len() <= pickle.globals().len());
        let converted =
            Converter::new(&pickle, &Limits::DEFAULT, &mut ()).convert(pickle.root()).unwrap();
        if converted.faithful {
            dump(&converted.value).unwrap();
        }
    }
}

pub fn pickle_rewrite(bytes: &[u8]) {
    let Ok(pickle) = Pickle::parse(bytes, &Limits::DEFAULT) else { return };
    let mut writer = Writer::new();
    if writer.graph(&pickle, pickle.root(), &mut NoStorages).is_err() {
        return;
    }
    let again = writer.finish().unwrap();
    let again = Pickle::parse(&again, &Limits::DEFAULT).unwrap();
    let view = |pickle: &Pickle<'_>| {
        Converter::new(pickle, &Limits::DEFAULT, &mut ()).convert(pickle.root()).unwrap().value
    };
    let (before, after) = (view(&pickle), view(&again));
    if !before.same(&after) {
        // Where what is shown is cut depends on how much there is, and nodes are renumbered.
        let cut = |text: &str| text.contains("<more>") || text.contains("<deeper>");
        let texts = (format!("{before:?}"), format!("{after:?}"));
        assert!(cut(&texts.0) || cut(&texts.1), "{} became {}", texts.0, texts.1);
    }
}

struct NoStorages;

impl PersistentSink for NoStorages {
    fn persistent(&mut self, _: &mut Writer, _: &Pickle<'_>, _: NodeId) -> Result<(), FormatError> {
        Err(FormatError::new("pickle", "there are no storages"))
    }
}

pub fn torch_zip(bytes: &[u8]) {
    let blob = Sparse::whole(bytes);
    let Ok(index) = ArchiveIndex::parse(&blob).and_then(ParseStep::ready) else { return };
    for entry in index.entries() {
        if let Ok(record) = entry.locate(&blob).and_then(ParseStep::ready) {
            let kept = blob.get(record.data.clone()).unwrap();
            let _ = record.decode(kept, 1 << 21);
        }
    }
}

pub fn metadata(bytes: &[u8]) {
    let plain = Pickle::parse(bytes, &Limits::DEFAULT).and_then(|pickle| decode_parsed(&pickle));
    let metadata = match (decode_all(bytes), plain) {
        (Ok(decoded), Ok(plain)) => {
            assert_eq!(shown(&decoded), shown(&plain));
            decoded.metadata
        }
        // Records take less memory.
        (Ok(decoded), Err(error)) => {
            assert!(error.problem().contains("MiB of memory"), "{error}");
            decoded.metadata
        }
        (Err(error), plain) => {
            assert_eq!(error.to_string(), plain.unwrap_err().to_string());
            // Without the tensor that is bad, it may be good.
            drop(decode_selected(bytes, &WantedKeys::new(is_wanted)));
            return;
        }
    };
    let mut wanted = metadata.clone();
    wanted.retain(|fqn, entry| entry.as_object().is_some() || is_wanted(fqn));
    let selected = decode_selected(bytes, &WantedKeys::new(is_wanted)).unwrap();
    assert_eq!(entries(&selected.metadata), entries(&wanted));
    assert_eq!(selected.names.is_some(), wanted.len() < metadata.len());
    if let Some(names) = selected.names {
        assert!(names.iter().map(|(fqn, _)| fqn).eq(metadata.iter().map(|(fqn, _)| fqn)));
        let files = |of: &CheckpointMetadata| of.files().iter().cloned().collect::<BTreeSet<_>>();
        assert_eq!(files(&names), files(&metadata));
    }
    for (_, entry) in metadata.iter() {
        if let Entry::Tensor(tensor) = entry
            && check_chunks(tensor).is_ok()
        {
            for chunk in tensor.chunks.iter() {
                let region = chunk.region().unwrap();
                assert_eq!(region.runs_in(&tensor.shape).remaining() == 0, region.volume() == 0);
            }
        }
    }
    let _ = Profile::of(bytes);
    for profile in [Profile::Compat, Profile::Olmo] {
        if let Ok(again) = encode(&metadata, profile) {
            decode_all(&again).unwrap();
            Profile::of(&again).unwrap();
        }
    }
}

/// Whether a tensor is among those that are read alone: about half of all.
fn is_wanted(fqn: &str) -> bool {
    fqn.bytes().fold(0, u8::wrapping_add) % 2 == 0
}

/// The entries of an index, with names of files for their numbers.
fn entries(metadata: &CheckpointMetadata) -> String {
    let place = |placement: Option<Placement>| {
        let Placement { file, byte_offset, byte_len, .. } = placement?;
        let encoding = metadata.encoding(&placement?);
        Some(format!("{:?} {byte_offset} {byte_len} {encoding:?}", metadata.file(file)))
    };
    let entry = |(fqn, entry): (&Arc<str>, &Entry)| match entry {
        Entry::Tensor(tensor) => {
            let chunks = tensor.chunks.iter();
            let chunks = chunks.map(|chunk| (chunk.offsets, chunk.sizes, place(chunk.placement)));
            let chunks: Vec<_> = chunks.collect();
            let TensorEntry { dtype, shape, path, properties, .. } = tensor;
            format!("{fqn:?} {dtype:?} {shape:?} {path:?} {properties:?} {chunks:?}\n")
        }
        Entry::Object(object) => {
            format!("{fqn:?} {:?} {:?}\n", object.path, place(object.placement))
        }
        _ => format!("{fqn:?}\n"),
    };
    metadata.iter().map(entry).collect()
}

/// Everything that an index says, in a fixed order.
fn shown(decoded: &Decoded) -> String {
    let metadata = &decoded.metadata;
    let mut shapes: Vec<_> = decoded.original_shapes.iter().collect();
    shapes.sort();
    format!(
        "{:?} {:?} {:?} {:?} {shapes:?} {:?}",
        metadata.iter().collect::<Vec<_>>(),
        metadata.files(),
        metadata.encodings(),
        metadata.provenance(),
        decoded.foreign_names,
    )
}

pub fn zarr(bytes: &[u8]) {
    let Ok(header) = ArrayHeader::parse(bytes) else { return };
    let grid = header.grid();
    assert_eq!(grid.ndim(), header.shape.ndim());
    let padded = grid.iter().zip(&*header.chunks).zip(&*header.shape);
    for ((parts, chunk), len) in padded {
        assert!(u128::from(*parts) * u128::from(*chunk) >= u128::from(*len));
        assert!(parts.saturating_sub(1) * chunk <= *len);
    }
    assert!(header.chunk_bytes() >= header.dtype.size() as u64);
    let _ = header.chunk_name(&grid);
}

pub fn folder(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let keys = text.lines().filter_map(|name| Key::new(name).ok());
    let listing = Listing::new(keys.map(|key| ObjectMeta::new(key, 1)));
    let formats = dcp_formats::formats();
    let root = listing.root();
    let _ = formats.explain(&root);
    for below in std::iter::once(root).chain(root.folders()) {
        assert!(below.files().count() <= below.file_count());
        let _ = formats.classify(&below);
    }
}

pub fn tensor_blob(bytes: &[u8]) {
    let blob = Sparse::whole(bytes);
    if let Some(located) = TensorBlob::locate_from_head(bytes, bytes.len() as u64) {
        assert!(located.storage().data.end <= bytes.len() as u64);
    }
    let Ok(tensor) = TensorBlob::parse(&blob).and_then(ParseStep::ready) else { return };
    let kept = blob.get(tensor.storage().data.clone()).unwrap();
    if let Ok(elements) = tensor.decode(kept, 1 << 21)
        && let Some(range) = tensor.element_range()
    {
        assert_eq!(blob.get(range), Some(elements.as_slice()));
    }
}

pub fn object_blob(bytes: &[u8]) {
    if let Ok(value) = decode_object(&Bytes::copy_from_slice(bytes)) {
        let again = encode_object(&value).unwrap();
        if !matches!(value, Value::Opaque(_)) {
            assert!(value.same(&decode_object(&again).unwrap()));
        }
    }
}

pub fn safetensors(bytes: &[u8]) {
    let len = bytes.len() as u64;
    let Ok(json) = header_len(bytes, len) else { return };
    let start = (PREFIX_LEN + json) as usize;
    if let Ok(header) = Header::parse(&bytes[PREFIX_LEN as usize..start], len - start as u64) {
        for (_, info) in header.tensors() {
            assert!(bytes.len() as u64 >= start as u64 + info.byte_range.end);
        }
    }
}

pub fn plan_wire(bytes: &[u8]) {
    if let Ok(plan) = SavePlan::from_wire(bytes) {
        assert_eq!(SavePlan::from_wire(&plan.to_wire()).unwrap().to_wire(), plan.to_wire());
        // The whole plan of a rank, and what another one sends without its outline.
        let parts = plan.to_parts();
        let own = parts.summary();
        let other = PlanSummary { fingerprint: !own.fingerprint, ..own };
        let request = PlanRequest::of(&[own, other, own]);
        let answers = [0, 1, 2].map(|rank| request.answer(rank, &parts));
        let sent = SavePlan::from_answers(&[own, other, own], &answers).unwrap();
        assert!(sent.iter().all(|sent| sent.to_wire() == plan.to_wire()));
    }
    plan_answers(bytes);
    if let Ok(plan) = WritePlan::from_wire(bytes) {
        assert_eq!(WritePlan::from_wire(&plan.to_wire()).unwrap(), plan);
    }
    if let Ok(plan) = LoadPlan::from_wire(bytes) {
        assert_eq!(LoadPlan::from_wire(&plan.to_wire()).unwrap(), plan);
    }
    if let Ok(metadata) = CheckpointMetadata::from_wire(bytes) {
        let wire = metadata.to_wire();
        assert_eq!(CheckpointMetadata::from_wire(&wire).unwrap().to_wire(), wire);
    }
    if let Ok(value) = Value::from_wire(bytes) {
        // A dict with a key twice has it once.
        let wire = value.to_wire().unwrap();
        assert!(Value::from_wire(&wire).unwrap().same(&value));
    }
}

/// Decodes answers to the request of the coordinator: the first byte is the length of the first one, in
/// units of four bytes.
pub fn answers_of(bytes: &[u8]) -> Result<Vec<SavePlan>, PlanError> {
    let (len, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let (whole, values) = rest.split_at(rest.len().min(4 * usize::from(*len)));
    let summary = |fingerprint| PlanSummary { fingerprint, outline: 1 };
    let summaries = [summary(1), summary(2), summary(1)];
    SavePlan::from_answers(&summaries, &[whole, values, &[]])
}

fn plan_answers(bytes: &[u8]) {
    if let Ok(plans) = answers_of(bytes) {
        assert_eq!(plans[0], plans[2]);
        let wire = plans[1].to_wire();
        assert_eq!(SavePlan::from_wire(&wire).unwrap().to_wire(), wire);
    }
    if let Ok(mut input) = MessageReader::new(bytes, *b"rank")
        && let Ok(request) = PlanRequest::read_from(&mut input)
    {
        let mut out = MessageWriter::new(*b"rank");
        request.write_to(&mut out);
        let message = out.finish();
        let mut again = MessageReader::new(&message, *b"rank").unwrap();
        assert_eq!(PlanRequest::read_from(&mut again).unwrap(), request);
    }
}

pub fn sidecar(bytes: &[u8]) {
    let Some((crc32, bytes)) = bytes.split_first_chunk::<4>() else { return };
    let _ = Sidecar::decode(bytes, u32::from_le_bytes(*crc32));
}

/// An index file, or the text that says where tensors belong.
pub fn hf_index(bytes: &[u8]) {
    if let Ok(index) = IndexFile::parse(bytes) {
        let again = IndexFile::parse(&index.to_json()).unwrap();
        assert_eq!(again.weight_map, index.weight_map);
        assert!(index.files().count() <= index.weight_map.len());
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(info) = ShardingInfo::parse(text)
    {
        assert_eq!(ShardingInfo::parse(&info.to_json()).unwrap(), info);
    }
}
