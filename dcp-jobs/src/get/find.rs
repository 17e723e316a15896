//! Reads one tensor, or a part of it: as text, as JSON, or as a file.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::dims::checked_volume;
use dcp_core::error::ChunksProblem;
use dcp_core::metadata::Entry;
use dcp_core::{DType, Dims, PlanError, Region, StorageErrorKind};
use dcp_formats::safetensors::{RawTypes, SafetensorsItem};
use dcp_formats::torch_save::encode_value;
use indexmap::IndexMap;
use serde_json::json;

use crate::element::decode;
use crate::element::npy::{npy_header, npy_type};
use crate::element::print::Excerpt;
use crate::element::slice::TensorSlice;
use crate::element::value_json::{JsonLimits, element_json, value_json};
use crate::error::JobError;
use crate::integrity::callables::admit_callables;
use crate::integrity::checked_source::CheckedSource;
use crate::keys::suggest::unknown_fqn;
use crate::options::JobOptions;
use crate::read::objects::{read_object, read_objects, unread};
use crate::read::tensor_read::TensorReader;
use crate::source::Source;
use crate::source::decode_cache::EXPANSION_MAX;
use crate::view::{Stepped, with_quantizers};
use crate::write::stored_data_source::{CheckpointData, Part};
use crate::write::target::Target;

/// The entry of a name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Found {
    /// A tensor, or the requested part of it.
    Tensor(FoundTensor),
    /// Any other value, as [`value_json`] writes it.
    Object(serde_json::Value),
}

/// A tensor, or a part of one, to read.
#[derive(Clone, Debug)]
pub struct FoundTensor {
    fqn: Arc<str>,
    dtype: DType,
    slice: Box<TensorSlice>,
    /// The source whose checked form `reader` reads.
    source: Source,
    reader: Arc<TensorReader>,
    /// The stored tensor, before slicing with steps.
    stored: Arc<TensorReader>,
}

/// Finds `fqn` and, in it, the part that `slice` names in [`TensorSlice::parse`]'s notation. Reads
/// an object at once, a tensor later.
///
/// # Errors
///
/// When there is no such name ([`JobError::UnknownFqn`] lists similar ones), the slice does not
/// fit the tensor, or the checkpoint cannot be read.
pub async fn find(source: &Source, fqn: &str, slice: Option<&str>) -> Result<Found, JobError> {
    let metadata = source.metadata().await?;
    let Some(index) = metadata.index_of(fqn) else { return Err(unknown_fqn(&metadata, fqn)) };
    match metadata.at(index) {
        Some((fqn, Entry::Tensor(tensor))) => {
            let slice = match slice {
                Some(text) => TensorSlice::parse(text, &tensor.shape)?,
                None => TensorSlice::whole(&tensor.shape)?,
            };
            let options = JobOptions::default().with_parallelism(1);
            let source = CheckedSource::new(source, &options).into_source();
            let (reader, fqn) = (Arc::clone(&source.reader), Arc::clone(fqn));
            let dtype = tensor.dtype;
            let stored = Arc::new(TensorReader::new(reader, Arc::clone(&metadata), index)?);
            let (reader, slice) = match slice.is_box() {
                true => (Arc::clone(&stored), slice),
                false => {
                    let reader = Stepped::reader(&stored, &slice)?;
                    (Arc::new(reader), TensorSlice::whole(&slice.shape)?)
                }
            };
            let slice = Box::new(slice);
            Ok(Found::Tensor(FoundTensor { fqn, dtype, slice, source, reader, stored }))
        }
        _ => {
            if slice.is_some() {
                return Err(JobError::NotATensor { fqn: fqn.to_owned(), part: "slices" });
            }
            let mut values = read_objects(source, &metadata, &[index]).await;
            let value = values.remove(&index).unwrap_or_else(|| Err(unread(&metadata, index)))?;
            Ok(Found::Object(value_json(&value, &JsonLimits::default())))
        }
    }
}

/// Writes the object `fqn` alone to a `torch.save` file, and returns its length in bytes.
///
/// # Errors
///
/// When there is no such object, or it cannot be read or written; when [`JobOptions::callables`]
/// does not allow what Python would call to load it; when the target exists.
pub async fn object_to_torch_save(
    source: &Source,
    fqn: &str,
    target: &Target,
    options: &JobOptions,
) -> Result<u64, JobError> {
    target.check().await?;
    let source = CheckedSource::new(source, options);
    let value = read_object(&source, fqn).await?;
    admit_callables(&fqn.into(), &value, options)?;
    let encoded = encode_value(&value, "archive")
        .map_err(|error| JobError::not_storable(fqn, format!("cannot be written: {error}")))?;
    let byte_len = encoded.len() as u64;
    target.put(encoded, source.finish().await?).await?;
    Ok(byte_len)
}

impl FoundTensor {
    /// The name of the tensor.
    #[must_use]
    pub fn fqn(&self) -> &str {
        &self.fqn
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of the requested part.
    #[must_use]
    pub fn shape(&self) -> &Dims {
        &self.slice.shape
    }

    /// Bytes of the requested part.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.slice.region.volume().saturating_mul(self.dtype.size() as u64)
    }

    /// The text that PyTorch prints. Of a large tensor, only the elements in the text are read, so
    /// their chunks are not compared with checksums.
    ///
    /// # Errors
    ///
    /// When the tensor cannot be read, or has too many axes to be shown.
    pub async fn to_text(&self) -> Result<String, JobError> {
        let excerpt = Excerpt::of(&self.slice.shape)?;
        let mut boxes = Vec::new();
        for shown in excerpt.boxes() {
            boxes.push(self.in_tensor(&shown)?);
        }
        let bytes = self.reader.read(&boxes).await?;
        Ok(excerpt.print(self.dtype, &bytes))
    }

    /// A box of the part, in the coordinates of the whole tensor.
    fn in_tensor(&self, inner: &Region) -> Result<Region, JobError> {
        let outer = &self.slice.region;
        let mut given = inner.offsets().iter().zip(inner.sizes().iter()).peekable();
        let axes = self.slice.axes.iter().zip(outer.offsets().iter());
        let (offsets, sizes): (Vec<u64>, Vec<u64>) = axes
            .map(|(axis, start)| match given.next_if(|_| !axis.indexed) {
                Some((offset, size)) => (start + offset, *size),
                None => (*start, 1),
            })
            .unzip();
        Region::new(offsets, sizes)
            .map_err(|error| PlanError::from(error).with_fqn(&*self.fqn).into())
    }

    /// All elements, row-major and little-endian.
    ///
    /// # Errors
    ///
    /// When the stored bytes cannot possibly hold that many elements, or cannot be read.
    pub async fn read(&self) -> Result<Bytes, JobError> {
        self.refuse_implausible().await?;
        let source = CheckedSource::new(&self.source, &JobOptions::default());
        let elements = self.reader.read(std::slice::from_ref(&self.slice.region)).await?;
        drop(source.finish().await?);
        Ok(elements)
    }

    /// `{"kind": "tensor", "dtype", "shape", "values"}`, the values as nested lists.
    ///
    /// # Errors
    ///
    /// As [`FoundTensor::read`], and when there are more than a million elements.
    pub async fn to_json(&self) -> Result<serde_json::Value, JobError> {
        const MAX_VALUES: u64 = 1_000_000;
        // Without elements there may still be any number of empty rows.
        let rows = |sizes: &[u64]| checked_volume(sizes.split_last().map_or(&[], |(_, rest)| rest));
        let listed = rows(&self.slice.shape).map(|rows| rows.max(self.slice.region.volume()));
        if listed.is_none_or(|listed| listed > MAX_VALUES) {
            return Err(JobError::TooLarge {
                what: format!("{:?}", self.fqn),
                limit: "a million elements".to_owned(),
                instead: "write it to a file, or take a slice",
            });
        }
        let bytes = self.read().await?;
        let elements = bytes.chunks_exact(self.dtype.size());
        let elements = elements.filter_map(|bytes| decode(self.dtype, bytes));
        let mut values: Vec<_> = elements.map(|value| element_json(&value)).collect();
        for axis in (0..self.slice.shape.ndim()).rev() {
            let rows = self.slice.shape.iter().take(axis).product::<u64>();
            let len = usize::try_from(self.slice.shape[axis]).unwrap_or(0);
            let mut items = values.into_iter();
            values = (0..rows).map(|_| items.by_ref().take(len).collect()).collect();
        }
        let values = values.into_iter().next();
        Ok(json!({
            "kind": "tensor",
            "dtype": self.dtype.name(),
            "shape": &*self.slice.shape,
            "values": values,
        }))
    }

    /// Writes a `.npy` file. A type that NumPy lacks is written as unsigned integers of its size;
    /// the returned note says so.
    ///
    /// Compares every chunk that is read whole with its checksum. A chunk that is read in part is not
    /// compared, because a checksum needs all of its bytes.
    ///
    /// # Errors
    ///
    /// When the target exists, a chunk is damaged, or reading or writing fails; then there is no new file.
    pub async fn to_npy(
        &self,
        target: &Target,
        options: &JobOptions,
    ) -> Result<Option<String>, JobError> {
        target.check().await?;
        let header = npy_header(self.dtype, &self.slice.shape)?;
        options.start(self.byte_len());
        let (source, data) = self.data(options);
        let file = target.headed(header, self.byte_len(), Arc::new(data)).await?;
        file.publish(source).await?;
        let kind = npy_type(self.dtype);
        Ok((!kind.exact).then(|| {
            format!("NumPy has no {}; the file holds its bits as {:?}", self.dtype, kind.descr)
        }))
    }

    /// Writes a `.safetensors` file with this one tensor, under its FQN. Checksums are compared
    /// as in [`to_npy`](Self::to_npy).
    ///
    /// # Errors
    ///
    /// When the format has no name for the type, the target exists, or reading or writing fails;
    /// then there is no new file.
    pub async fn to_safetensors(
        &self,
        target: &Target,
        options: &JobOptions,
    ) -> Result<(), JobError> {
        let (stored, _) = RawTypes::default().stored_as(&self.fqn, self.dtype, &self.slice.shape);
        if stored != self.dtype {
            let problem = format!(
                "is {}, which a safetensors file has no name for; write a .pt or a .npy file",
                self.dtype
            );
            return Err(JobError::not_storable(&*self.fqn, problem));
        }
        target.check().await?;
        options.start(self.byte_len());
        let item = SafetensorsItem {
            name: Arc::clone(&self.fqn),
            dtype: self.dtype,
            shape: self.slice.shape.clone(),
        };
        let header = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
        let (source, data) = self.data(options);
        let file = target.safetensors(&[item], &header, Arc::new(data)).await?;
        file.publish(source).await?;
        Ok(())
    }

    /// Writes a file of `torch.save` that holds this tensor alone: `torch.load` returns it. Checksums
    /// are compared as in [`to_npy`](Self::to_npy). A quantized tensor is written as it is stored.
    ///
    /// # Errors
    ///
    /// When a part of a quantized tensor is requested, whose scale belongs to the whole; when the
    /// target exists, or reading or writing fails; then there is no new file.
    pub async fn to_torch_save(
        &self,
        target: &Target,
        options: &JobOptions,
    ) -> Result<(), JobError> {
        if self.dtype.is_quantized() {
            return self.quantized_to_torch_save(target, options).await;
        }
        target.check().await?;
        options.start(self.byte_len());
        let (source, data) = self.data(options);
        let tensor = (&self.fqn, self.dtype, &*self.slice.shape);
        let file = target.tensor(tensor, Arc::new(data)).await?;
        file.publish(source).await?;
        Ok(())
    }

    /// Its elements as item 0, and what compares them.
    fn data(&self, options: &JobOptions) -> (CheckedSource, CheckpointData) {
        let part = Part::Tensor {
            reader: Arc::clone(&self.reader),
            region: self.slice.region.clone(),
            element_bytes: self.dtype.size() as u64,
        };
        let source = CheckedSource::new(&self.source, options);
        let data = CheckpointData::new(&source, vec![part], options);
        (source, data)
    }

    async fn quantized_to_torch_save(
        &self,
        target: &Target,
        options: &JobOptions,
    ) -> Result<(), JobError> {
        if *self.slice.shape != *self.stored.tensor()?.shape {
            let problem = format!("is {}, of which only the whole has a scale", self.dtype);
            return Err(JobError::not_storable(&*self.fqn, problem));
        }
        let source = with_quantizers(CheckedSource::new(&self.source, options), |_| true).await?;
        object_to_torch_save(&source, &self.fqn, target, options).await.map(drop)
    }

    /// Fails when the files are too short for so many elements, so that a shape from a hostile
    /// index claims no memory.
    async fn refuse_implausible(&self) -> Result<(), JobError> {
        const HARMLESS: u64 = 1 << 20;
        if self.byte_len() <= HARMLESS {
            return Ok(());
        }
        let tensor = self.stored.tensor()?;
        let metadata = self.stored.metadata();
        let mut room = 0_u64;
        for placement in tensor.chunks.iter().filter_map(|chunk| chunk.placement) {
            let Some(key) = metadata.file(placement.file) else { continue };
            let len = match self.source.storage.stat(key).await {
                Ok(meta) => meta.byte_len.min(placement.byte_len),
                Err(error) if error.kind() == StorageErrorKind::NotFound => 0,
                Err(error) => return Err(error.into()),
            };
            let plain = metadata.encoding(&placement).is_some_and(|e| e.transforms.is_empty());
            let most = if plain { len } else { len.saturating_mul(EXPANSION_MAX) };
            room = room.saturating_add(most);
        }
        if room >= self.byte_len() {
            return Ok(());
        }
        Err(ChunksProblem::Uncovered {
            expected: self.slice.region.volume(),
            found: room / self.dtype.size() as u64,
        }
        .of(self.fqn.to_string())
        .into())
    }
}
