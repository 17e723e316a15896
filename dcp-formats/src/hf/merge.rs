//! Merges the headers of many files into one index.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::text::counted;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Dims, FormatError, Key};
use indexmap::IndexMap;

use super::finding::{Finding, FindingKind};
use super::load::{Files, Index};
use crate::chunk_geometry::check_chunks;
use crate::safetensors::{
    Image, RAW, RangeProblem, Ranges, RawTypes, SHARDING, SHARDING_VERSION, TIED, ties_of,
};

/// The texts of a header that say how its tensors are stored, which a copy has of its own.
const OWN_TEXTS: &[&str] = &["format", RAW, TIED, SHARDING, SHARDING_VERSION, "dcp.left_out"];

/// The result of reading a file's header.
pub(super) enum FileHeader {
    Read(Box<Image>, Option<RangeProblem>),
    Unreadable(Finding),
    Missing,
}

/// A merged index, and its problems.
#[derive(Default)]
pub(super) struct Merged {
    pub(super) metadata: CheckpointMetadata,
    pub(super) findings: Vec<Finding>,
    /// Findings that the metadata and the lengths of files show, too.
    pub(super) visible: Vec<Finding>,
    /// Observations that do not prevent reading.
    pub(super) notes: Vec<String>,
    /// Tensors with missing parts.
    pub(super) incomplete: Vec<String>,
}

/// The parts of one tensor.
struct Parts {
    dtype: DType,
    /// The extent of the parts.
    shape: Dims,
    parts: Vec<Part>,
    offsets: HashSet<Dims>,
}

struct Part {
    offsets: Dims,
    sizes: Dims,
    placement: Placement,
    file: Key,
    /// Whether the header gives the part's offsets.
    sharded: bool,
}

/// Merges headers, in the order of the files.
pub(super) fn merge(
    files: &Files,
    headers: Vec<FileHeader>,
    single: bool,
) -> Result<Merged, CheckpointError> {
    let mut merger = Merger::new(files.index.as_ref())?;
    for (key, header) in files.keys.iter().zip(headers) {
        merger.add(key, header)?;
    }
    let mut merged = merger.finish();
    let format = if single { "safetensors" } else { "hf" };
    merged.metadata.provenance_mut().format = Some(format.into());
    Ok(merged)
}

struct Merger<'a> {
    index: Option<&'a Index>,
    /// The file of each tensor according to the index; resolved.
    homes: IndexMap<Arc<str>, Key>,
    tensors: IndexMap<Arc<str>, Parts>,
    /// Tensors stored under another name.
    tied: IndexMap<Arc<str>, Arc<str>>,
    /// Files without a readable header.
    silent: HashSet<Key>,
    /// Tensors that the index places in another file.
    displaced: Option<(usize, Arc<str>)>,
    /// Tensors that the index does not name.
    unlisted: Option<(usize, Arc<str>)>,
    /// The texts of headers, by name.
    annotations: IndexMap<Arc<str>, Arc<str>>,
    doubled: Option<(usize, Arc<str>)>,
    bytes: u64,
    encoding: u16,
    merged: Merged,
}

impl<'a> Merger<'a> {
    fn new(index: Option<&'a Index>) -> Result<Self, CheckpointError> {
        let mut homes = IndexMap::new();
        if let Some(index) = index {
            for (fqn, file) in &index.file.weight_map {
                homes.insert(Arc::clone(fqn), index.resolve(file)?);
            }
        }
        let mut merged = Merged::default();
        let encoding = merged.metadata.intern_encoding(&Encoding::new(Layout::Raw));
        let encoding = encoding.ok_or_else(too_many)?;
        Ok(Self {
            index,
            homes,
            tensors: IndexMap::new(),
            tied: IndexMap::new(),
            silent: HashSet::new(),
            displaced: None,
            unlisted: None,
            annotations: IndexMap::new(),
            doubled: None,
            bytes: 0,
            encoding,
            merged,
        })
    }

    fn add(&mut self, key: &Key, header: FileHeader) -> Result<(), CheckpointError> {
        let (image, problem) = match header {
            FileHeader::Read(image, problem) => (image, problem),
            FileHeader::Unreadable(finding) => {
                self.silent.insert(key.clone());
                self.merged.findings.push(finding);
                self.merged.metadata.intern_file(key).ok_or_else(too_many)?;
                return Ok(());
            }
            FileHeader::Missing => {
                self.silent.insert(key.clone());
                self.missing(key);
                return Ok(());
            }
        };
        if let Some(problem) = problem {
            self.range_problem(key, &problem);
        }
        let file = self.merged.metadata.intern_file(key).ok_or_else(too_many)?;
        let raw = RawTypes::of(&image.header);
        let ties: IndexMap<_, _> = ties_of(&image.header).into_iter().collect();
        for (name, text) in image.header.metadata() {
            if !OWN_TEXTS.contains(&&**name) && !ties.contains_key(&**name) {
                let text = || Arc::from(text.as_str());
                self.annotations.entry(name.as_str().into()).or_insert_with(text);
            }
        }
        self.tied.extend(ties);
        for (fqn, info) in image.header.tensors() {
            let (dtype, sizes) = raw.typed(fqn, info);
            let stated = image.sharding.get(fqn);
            if !self.belongs(fqn, key, stated.is_some()) {
                continue;
            }
            let byte_len = info.byte_range.end - info.byte_range.start;
            let Some(byte_offset) = image.data_start.checked_add(info.byte_range.start) else {
                continue;
            };
            self.bytes = self.bytes.saturating_add(byte_len);
            let part = Part {
                offsets: stated.cloned().unwrap_or_else(|| Dims::zeros(sizes.ndim())),
                sizes,
                placement: Placement { file, encoding: self.encoding, byte_offset, byte_len },
                file: key.clone(),
                sharded: stated.is_some(),
            };
            if let Err((kind, message)) = self.push(fqn, dtype, part) {
                self.merged.findings.push(Finding::new(kind, message).of(fqn).within(key));
            }
        }
        Ok(())
    }

    fn missing(&mut self, key: &Key) {
        let mut held = self.homes.iter().filter(|(_, home)| *home == key).map(|(fqn, _)| fqn);
        let message = match (held.next(), held.count()) {
            (None, _) => "the file is missing".to_owned(),
            (Some(one), 0) => format!("the file is missing; it should hold {one:?}"),
            (Some(one), n) => format!("the file is missing; it should hold {one:?} and {n} more"),
        };
        self.merged.findings.push(Finding::new(FindingKind::MissingFile, message).within(key));
    }

    fn range_problem(&mut self, key: &Key, problem: &RangeProblem) {
        let kind = match problem.kind {
            Ranges::Overlap => FindingKind::SharedBytes,
            Ranges::Gap | Ranges::Long => FindingKind::ExtraBytes,
            Ranges::Short => FindingKind::ShortFile,
        };
        let mut finding = Finding::new(kind, problem.problem.clone()).within(key);
        finding.fqn = problem.name.clone();
        match kind {
            FindingKind::ShortFile => self.merged.visible.push(finding),
            _ => self.merged.findings.push(finding),
        }
    }

    /// Whether a tensor of a file belongs to the model. Without an index all do. With one, the
    /// tensor must be in the file that the index names; parts of it may be in others. One that the
    /// index does not name belongs to it too, because transformers loads whole files.
    fn belongs(&mut self, fqn: &Arc<str>, file: &Key, sharded: bool) -> bool {
        if self.index.is_none() {
            return true;
        }
        let Some(home) = self.homes.get(fqn) else {
            self.unlisted.get_or_insert_with(|| (0, Arc::clone(fqn))).0 += 1;
            return true;
        };
        let is_there = home == file || sharded;
        if !is_there {
            self.displaced.get_or_insert_with(|| (0, Arc::clone(fqn))).0 += 1;
        }
        is_there
    }

    fn push(
        &mut self,
        fqn: &Arc<str>,
        dtype: DType,
        part: Part,
    ) -> Result<(), (FindingKind, String)> {
        let odd = |message: String| Err((FindingKind::Parts, message));
        if part.offsets.ndim() != part.sizes.ndim() {
            let (offsets, sizes) = (part.offsets.ndim(), &part.sizes);
            return odd(format!("it has shape {sizes} here, but {offsets} offsets"));
        }
        let ends: Option<Dims> =
            part.offsets.iter().zip(&*part.sizes).map(|(at, n)| at.checked_add(*n)).collect();
        let Some(ends) = ends else {
            return odd(format!("its part at {} of {} ends beyond 2^64", part.offsets, part.sizes));
        };
        let Some(known) = self.tensors.get_mut(fqn) else {
            let offsets = HashSet::from([part.offsets.clone()]);
            let parts = Parts { dtype, shape: ends, parts: vec![part], offsets };
            self.tensors.insert(Arc::clone(fqn), parts);
            return Ok(());
        };
        let Some(first) = known.parts.first() else { return Ok(()) };
        if !(part.sharded && first.sharded) {
            let message = format!(
                "it is also in {:?}, and no DCP_SHARDING_INFO says that these are parts of one; \
                 each of the files can be read alone",
                first.file
            );
            return Err((FindingKind::Twice, message));
        }
        if (known.dtype, known.shape.ndim()) != (dtype, ends.ndim()) {
            return odd(format!(
                "it is {dtype} with {} axes here, and {} with {} axes in {:?}",
                ends.ndim(),
                known.dtype,
                known.shape.ndim(),
                first.file
            ));
        }
        if !known.offsets.insert(part.offsets.clone())
            && known.parts.iter().any(|p| (&p.offsets, &p.sizes) == (&part.offsets, &part.sizes))
        {
            self.doubled.get_or_insert_with(|| (0, Arc::clone(fqn))).0 += 1;
            return Ok(());
        }
        for (axis, end) in known.shape.iter_mut().zip(&*ends) {
            *axis = (*axis).max(*end);
        }
        known.parts.push(part);
        Ok(())
    }

    fn finish(mut self) -> Merged {
        for (fqn, home) in &self.homes {
            let there = self.tensors.get(fqn);
            let there = there.is_some_and(|parts| parts.parts.iter().any(|p| p.file == *home));
            if !there && !self.silent.contains(home) {
                let message = "the index places it in this file, which does not hold it";
                let finding = Finding::new(FindingKind::NotInFile, message).of(fqn).within(home);
                self.merged.findings.push(finding);
            }
        }
        // In the order of the index, if there is one, and then what it does not name.
        let order: IndexMap<_, _> =
            self.homes.keys().enumerate().map(|(n, fqn)| (fqn, n)).collect();
        if self.index.is_some() {
            self.tensors.sort_by_cached_key(|fqn, _| order.get(fqn).copied().unwrap_or(usize::MAX));
        }
        for (fqn, parts) in self.tensors {
            match parts.entry() {
                Ok(entry) => {
                    self.merged.check(&fqn, &entry);
                    self.merged.metadata.insert(fqn, Entry::Tensor(entry));
                }
                Err(message) => {
                    let finding = Finding::new(FindingKind::Parts, message).of(&fqn);
                    self.merged.findings.push(finding);
                }
            }
        }
        for (fqn, first) in self.tied {
            let metadata = &mut self.merged.metadata;
            if metadata.get(&fqn).is_none()
                && let Some(entry @ Entry::Tensor(_)) = metadata.get(&first).cloned()
            {
                metadata.insert(fqn, entry);
            }
        }
        if let Some((count, example)) = self.displaced {
            self.merged.notes.push(format!(
                "left out {} that the index does not place in its file, such as {example:?}",
                counted(count as u64, "tensor")
            ));
        }
        if let Some((count, example)) = self.unlisted {
            self.merged.notes.push(format!(
                "{} that the index does not name are part of the model, as for transformers, such as \
                 {example:?}",
                counted(count as u64, "tensor")
            ));
        }
        self.merged.metadata.provenance_mut().annotations = self.annotations.into_iter().collect();
        if let Some((count, example)) = self.doubled {
            self.merged.notes.push(format!(
                "{count} parts of tensors are stored more than once, such as one of {example:?}"
            ));
        }
        let claimed = self.index.and_then(|index| index.file.total_size);
        if let Some(claimed) = claimed
            && claimed != self.bytes
            && self.silent.is_empty()
        {
            let bytes = self.bytes;
            self.merged.notes.push(format!(
                "the index says that the tensors have {claimed} bytes, they have {bytes}"
            ));
        }
        self.merged
    }
}

impl Merged {
    fn check(&mut self, fqn: &Arc<str>, tensor: &TensorEntry) {
        match check_chunks(tensor) {
            Ok(None) => {}
            Ok(Some(warning)) => self.incomplete.push(format!("{fqn:?}: {warning}")),
            Err(problem) => {
                self.visible.push(Finding::new(FindingKind::Parts, problem).of(fqn));
            }
        }
    }
}

impl Parts {
    fn entry(self) -> Result<TensorEntry, String> {
        let mut tensor = TensorEntry::new(self.dtype, self.shape);
        for part in self.parts {
            let pushed = tensor.chunks.push(&part.offsets, &part.sizes, Some(part.placement));
            pushed.map_err(|error| error.to_string())?;
        }
        Ok(tensor)
    }
}

fn too_many() -> CheckpointError {
    FormatError::new("safetensors folder", "it has too many files").into()
}
