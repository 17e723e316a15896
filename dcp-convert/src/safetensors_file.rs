//! One safetensors file as a checkpoint: every tensor a chunk, no objects.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    Buffer, CheckpointError, CheckpointMetadata, DType, DataSink, Dims, Encoding, Entry,
    FormatError, Key, Layout, LoadPlan, LoanError, Placement, PlanError, ReadInto, ReadItem,
    ReadKind, ReadReport, Region, Storage, StorageError, StorageExt, StorageReader, TensorEntry,
    TensorView,
};
use dcp_formats::safetensors::{Header, PREFIX_LEN, TensorInfo, header_len};
use serde::Deserialize;

use crate::to_safetensors::RAW;

/// Runs of elements that are shorter than this many bytes are read together with what lies
/// between them.
const WORTH_A_READ: u64 = 64 << 10;
/// The most that is read together, in bytes.
const SPAN_MAX: u64 = 8 << 20;

/// Reads one `.safetensors` file.
///
/// Tensors that [`to_safetensors`](crate::to_safetensors()) stored as bytes, because the format
/// has no name for their type, get their type back.
pub struct SafetensorsFile {
    storage: Arc<dyn Storage>,
    key: Key,
}

impl SafetensorsFile {
    /// The file `key` of a storage.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { storage, key }
    }

    async fn header(&self) -> Result<(Header, u64), CheckpointError> {
        let file_len = self.storage.stat(&self.key).await?.byte_len;
        let prefix = self.storage.read_range(&self.key, 0..PREFIX_LEN.min(file_len)).await?;
        let in_file = |error: FormatError| error.in_file(self.key.as_str(), 0);
        let data_start = PREFIX_LEN + header_len(&prefix, file_len).map_err(in_file)?;
        let json = self.storage.read_range(&self.key, PREFIX_LEN..data_start).await?;
        let header = Header::parse(&json, file_len - data_start).map_err(in_file)?;
        Ok((header, data_start))
    }

    async fn read_item(
        &self,
        metadata: &CheckpointMetadata,
        item: &ReadItem,
        sink: &dyn DataSink,
    ) -> Result<(u64, u64), CheckpointError> {
        let bad = |problem: &str| PlanError::Unsupported {
            fqn: metadata.at(item.entry as usize).map_or(String::new(), |(fqn, _)| fqn.to_string()),
            problem: problem.to_owned(),
        };
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else {
            return Err(bad("a safetensors file holds no objects").into());
        };
        let tensor = metadata.at(item.entry as usize).and_then(|(_, entry)| entry.as_tensor());
        let tensor = tensor.ok_or_else(|| bad("it is no tensor"))?;
        let stored = tensor.chunks.get(*chunk as usize);
        let placement = stored.and_then(|chunk| chunk.placement);
        let (Some(stored), Some(placement)) = (stored, placement) else {
            return Err(bad("its bytes have no place").into());
        };
        let whole = stored.region().map_err(|error| bad(&error.to_string()))?;
        let inner = region.relative_to(stored.offsets).filter(|_| whole.contains(region));
        let inner = inner.ok_or_else(|| bad("a region outside of its chunk was asked for"))?;
        let element = tensor.dtype.size() as u64;
        let runs = inner
            .runs_in(stored.sizes)
            .map(move |(at, len)| (placement.byte_offset + at * element, len * element));
        let view = sink.destination(item)?;
        let read = self.fill(&view, runs).await.map_err(|error| match error {
            FillError::Storage(error) => error.into(),
            FillError::Loan(source) => {
                let fqn = metadata.at(item.entry as usize).map_or("", |(fqn, _)| fqn).to_owned();
                CheckpointError::Memory { fqn, source }
            }
        })?;
        sink.commit(item)?;
        Ok((view.byte_len(), read))
    }

    /// Reads `runs` of the file, which ascend, into the elements of `view`, and returns how many
    /// bytes were read. There may be a run for every element, so they are never listed.
    async fn fill(
        &self,
        view: &TensorView,
        mut runs: impl Iterator<Item = (u64, u64)> + Clone + Send,
    ) -> Result<u64, FillError> {
        let longest = runs.clone().next().map_or(0, |(_, len)| len);
        let whole = longest > 0 && longest == view.byte_len();
        if (whole || longest >= WORTH_A_READ) && view.is_contiguous() {
            let mut buffer = view.lend()?;
            let reads = runs.map(|(byte_offset, len)| {
                let len = usize::try_from(len).unwrap_or(usize::MAX).min(buffer.len());
                ReadInto { byte_offset, buffer: buffer.split_to(len) }
            });
            let reads = reads.collect();
            self.storage.read(&self.key, reads).await?;
            return Ok(view.byte_len());
        }
        let mut gathered = Gathered::new(view)?;
        let mut read = 0;
        loop {
            let mut span = runs.clone();
            let Some((start, len)) = runs.next() else { break };
            let (mut end, mut count) = (start + len, 1);
            let mut ahead = runs.clone();
            while let Some((next, len)) = ahead.next()
                && next + len - start <= SPAN_MAX
            {
                end = next + len;
                count += 1;
                runs.next();
            }
            let bytes = self.storage.read_range(&self.key, start..end).await?;
            read += end - start;
            for (at, len) in span.by_ref().take(count) {
                gathered.push(piece(&bytes, at - start, len));
            }
        }
        gathered.finish(view)?;
        Ok(read)
    }
}

/// Why a view was not filled.
#[derive(Debug)]
enum FillError {
    Storage(StorageError),
    Loan(LoanError),
}

impl From<StorageError> for FillError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<LoanError> for FillError {
    fn from(error: LoanError) -> Self {
        Self::Loan(error)
    }
}

/// Row-major elements on their way into a view: into its memory where they lie in it together.
enum Gathered {
    InPlace { memory: Buffer, filled: usize },
    Aside(Vec<u8>),
}

impl Gathered {
    fn new(view: &TensorView) -> Result<Self, LoanError> {
        if view.is_contiguous() {
            return Ok(Self::InPlace { memory: view.lend()?, filled: 0 });
        }
        Ok(Self::Aside(Vec::with_capacity(usize::try_from(view.byte_len()).unwrap_or(0))))
    }

    fn push(&mut self, piece: &[u8]) {
        match self {
            Self::InPlace { memory, filled } => {
                let end = filled.saturating_add(piece.len());
                // The runs have as many elements as the view.
                if let Some(place) = memory.get_mut(*filled..end) {
                    place.copy_from_slice(piece);
                }
                *filled = end;
            }
            Self::Aside(elements) => elements.extend_from_slice(piece),
        }
    }

    fn finish(self, view: &TensorView) -> Result<(), LoanError> {
        match self {
            // Dropping the loan gives the memory back.
            Self::InPlace { .. } => Ok(()),
            Self::Aside(elements) => view.fill_from(&elements),
        }
    }
}

fn piece(bytes: &[u8], at: u64, len: u64) -> &[u8] {
    let end = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(bytes.len());
    bytes.get(end(at)..end(at + len)).unwrap_or_default()
}

#[async_trait]
impl StorageReader for SafetensorsFile {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let (header, data_start) = self.header().await?;
        let raw = raw_types(&header);
        let mut metadata = CheckpointMetadata::new();
        metadata.provenance_mut().format = Some("safetensors".into());
        let full = || FormatError::new("safetensors header", "it has too many tensors");
        let file = metadata.intern_file(&self.key).ok_or_else(full)?;
        let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).ok_or_else(full)?;
        for (name, info) in header.tensors() {
            let (dtype, shape) = typed(name, info, &raw);
            let mut tensor = TensorEntry::new(dtype, shape.clone());
            let byte_len = info.byte_range.end - info.byte_range.start;
            let byte_offset = data_start + info.byte_range.start;
            let placement = Placement { file, encoding, byte_offset, byte_len };
            let pushed = tensor.chunks.push(&Dims::zeros(shape.ndim()), &shape, Some(placement));
            pushed.map_err(|error| FormatError::new("safetensors header", error.to_string()))?;
            metadata.insert(Arc::clone(name), Entry::Tensor(tensor));
        }
        Ok(Arc::new(metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        for item in &plan.items {
            let (needed, read) = self.read_item(metadata, item, &*sink).await?;
            report.bytes_needed += needed;
            report.bytes_read += read;
        }
        Ok(report)
    }
}

impl fmt::Debug for SafetensorsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SafetensorsFile").field("key", &self.key).finish_non_exhaustive()
    }
}

/// What the header says of a tensor that is stored as bytes.
#[derive(Deserialize)]
struct RawType {
    dtype: String,
    shape: Vec<u64>,
}

fn raw_types(header: &Header) -> serde_json::Map<String, serde_json::Value> {
    let text = header.metadata().get(RAW).map_or("{}", String::as_str);
    serde_json::from_str(text).unwrap_or_default()
}

/// The type and shape of a tensor: what [`RAW`] says where that fits the bytes, what the format
/// says otherwise.
fn typed(
    name: &str,
    info: &TensorInfo,
    raw: &serde_json::Map<String, serde_json::Value>,
) -> (DType, Dims) {
    let described = raw.get(name).filter(|_| info.dtype == DType::UInt8).and_then(|described| {
        let described = RawType::deserialize(described).ok()?;
        let dtype: DType = described.dtype.parse().ok()?;
        let shape = Dims::from(described.shape);
        (shape.ndim() <= Dims::MAX_AXES).then_some(())?;
        Region::full(shape.clone()).ok()?;
        let bytes = shape.checked_volume()?.checked_mul(dtype.size() as u64)?;
        (bytes == info.byte_range.end - info.byte_range.start).then_some((dtype, shape))
    });
    described.unwrap_or_else(|| (info.dtype, info.shape.clone()))
}
