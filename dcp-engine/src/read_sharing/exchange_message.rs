//! Messages of a rank that reads for others: pieces of tensors and objects, with their names.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::TensorError;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, HostMemory, PlanError, Region, StorageReader,
    TensorView, Value,
};

use crate::metadata_lookup::{bad_message, tensor_dtype};

/// A message: the length of a [`LoadPlan`] in four bytes, the plan, whose items say what the
/// pieces are, and their bytes one after the other. An object's bytes begin with their number, in
/// eight bytes.
#[derive(Debug)]
pub(crate) struct Parcel;

/// One piece of a message.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// The entry.
    pub(crate) entry: u32,
    /// Of a tensor, the chunk and its part; nothing of an object.
    pub(crate) place: Option<(u32, Region)>,
}

impl Piece {
    pub(crate) fn tensor(entry: u32, chunk: u32, region: Region) -> Self {
        Self { entry, place: Some((chunk, region)) }
    }

    fn item(&self, leaf: usize) -> ReadItem {
        let kind = match &self.place {
            Some((chunk, region)) => {
                ReadKind::Tensor { chunk: *chunk, shard: 0, region: region.clone() }
            }
            None => ReadKind::Object,
        };
        ReadItem { entry: self.entry, leaf: u32::try_from(leaf).unwrap_or(u32::MAX), kind }
    }
}

impl Parcel {
    /// The message after the last one.
    pub(crate) fn end() -> Bytes {
        Bytes::new()
    }

    /// Whether no more messages come.
    pub(crate) fn is_end(bytes: &Bytes) -> bool {
        bytes.is_empty()
    }

    fn header(pieces: &[Piece]) -> Result<Vec<u8>, CheckpointError> {
        let items = pieces.iter().enumerate().map(|(leaf, piece)| piece.item(leaf)).collect();
        let plan = LoadPlan { items }.to_wire();
        let len = u32::try_from(plan.len()).map_err(|_| PlanError::TooLarge {
            what: "the length of a message header in bytes".to_owned(),
            limit: u32::MAX.into(),
        })?;
        Ok([&len.to_le_bytes()[..], &plan].concat())
    }

    /// The pieces of a message and their bytes.
    pub(crate) fn open(
        bytes: &Bytes,
        metadata: &CheckpointMetadata,
    ) -> Result<Vec<(Piece, Bytes)>, CheckpointError> {
        let mut rest = bytes.clone();
        let mut take = |len: usize| {
            (len <= rest.len())
                .then(|| rest.split_to(len))
                .ok_or_else(|| bad_message("it ends too early"))
        };
        let number = |bytes: &Bytes| {
            let mut wide = [0; 8];
            wide.iter_mut().zip(&**bytes).for_each(|(to, from)| *to = *from);
            usize::try_from(u64::from_le_bytes(wide)).unwrap_or(usize::MAX)
        };
        let header_len = number(&take(4)?);
        let plan = LoadPlan::from_wire(&take(header_len)?)?;
        let mut pieces = Vec::with_capacity(plan.items.len());
        for item in plan.items {
            let (place, len) = match item.kind {
                ReadKind::Tensor { chunk, region, .. } => {
                    let size = tensor_dtype(metadata, item.entry)?.size() as u64;
                    let len = region.volume().checked_mul(size);
                    let len = len.and_then(|len| usize::try_from(len).ok()).unwrap_or(usize::MAX);
                    (Some((chunk, region)), len)
                }
                _ => {
                    let len = take(8)?;
                    (None, number(&len))
                }
            };
            pieces.push((Piece { entry: item.entry, place }, take(len)?));
        }
        Ok(pieces)
    }
}

/// Pieces of tensors that are read, and sent, together.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pieces: Vec<(Piece, DType)>,
    byte_len: u64,
}

impl Wanted {
    /// Bytes of all pieces.
    pub(crate) fn byte_len(&self) -> u64 {
        self.byte_len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(crate) fn push(&mut self, piece: Piece, dtype: DType) {
        let volume = piece.place.as_ref().map_or(0, |(_, region)| region.volume());
        self.byte_len += volume.saturating_mul(dtype.size() as u64);
        self.pieces.push((piece, dtype));
    }

    /// The message with these pieces, read straight into it.
    pub(crate) async fn read(
        self,
        reader: &Arc<dyn StorageReader>,
        metadata: &Arc<CheckpointMetadata>,
    ) -> Result<(Bytes, ReadReport), CheckpointError> {
        let pieces: Vec<Piece> = self.pieces.iter().map(|(piece, _)| piece.clone()).collect();
        let header = Parcel::header(&pieces)?;
        let failed = |source| {
            let fqn = "the message to another rank".to_owned();
            CheckpointError::Memory { fqn, source }
        };
        let data = usize::try_from(self.byte_len).unwrap_or(usize::MAX);
        let memory = HostMemory::try_zeroed(header.len().saturating_add(data));
        let memory = memory.ok_or_else(|| TensorError::OutOfMemory {
            what: "what another rank is sent".into(),
            byte_len: self.byte_len,
        })?;
        memory.lend(0..header.len()).map_err(failed)?.copy_from_slice(&header);
        let mut views = Vec::with_capacity(pieces.len());
        let (mut plan, mut at) = (LoadPlan::default(), header.len());
        for (leaf, (piece, dtype)) in self.pieces.iter().enumerate() {
            let Some((_, region)) = &piece.place else { continue };
            let sizes = region.sizes().clone();
            let view = TensorView::contiguous(memory.clone(), *dtype, sizes, at)?;
            at += usize::try_from(view.byte_len()).unwrap_or(0);
            views.push(view);
            plan.items.push(piece.item(leaf));
        }
        let sink = Arc::new(Collector::new(views));
        let report = reader.read(metadata, &plan, sink).await?;
        Ok((memory.read().map_err(failed)?, report))
    }

    /// The message with some objects.
    pub(crate) async fn objects(
        entries: &[u32],
        reader: &Arc<dyn StorageReader>,
        metadata: &Arc<CheckpointMetadata>,
    ) -> Result<(Bytes, ReadReport), CheckpointError> {
        let pieces: Vec<_> =
            entries.iter().map(|entry| Piece { entry: *entry, place: None }).collect();
        let items = pieces.iter().enumerate().map(|(leaf, piece)| piece.item(leaf)).collect();
        let sink = Arc::new(Collector::new(Vec::new()));
        let report = reader.read(metadata, &LoadPlan { items }, Arc::clone(&sink) as _).await?;
        let mut values = sink.take_objects();
        values.sort_by_key(|(leaf, _)| *leaf);
        if values.len() != pieces.len() {
            let arrived: HashSet<u32> = values.iter().map(|(leaf, _)| *leaf).collect();
            let missing = (0..).zip(entries).find(|(leaf, _)| !arrived.contains(leaf));
            let entry = missing.map_or(0, |(_, entry)| *entry as usize);
            let fqn = metadata.entry_name(entry).into_owned();
            return Err(PlanError::unread(fqn, "the value").into());
        }
        let mut message = Parcel::header(&pieces)?;
        for (_, value) in values {
            let value = value.to_wire()?;
            message.extend_from_slice(&(value.len() as u64).to_le_bytes());
            message.extend_from_slice(&value);
        }
        Ok((message.into(), report))
    }
}

/// A message that is still to be read.
#[derive(Debug)]
pub(crate) enum Message {
    /// Pieces of tensors.
    Tensors(Wanted),
    /// Entries that are objects.
    Objects(Vec<u32>),
}

impl Message {
    /// The messages of a plan whose items' leaves are the numbers of their messages, ascending.
    pub(crate) fn all_of(
        plan: &LoadPlan,
        metadata: &CheckpointMetadata,
    ) -> Result<VecDeque<Self>, CheckpointError> {
        let mut messages = VecDeque::new();
        for items in plan.items.chunk_by(|left, right| left.leaf == right.leaf) {
            let (mut wanted, mut objects) = (Wanted::default(), Vec::new());
            for item in items {
                match &item.kind {
                    ReadKind::Tensor { chunk, region, .. } => {
                        let dtype = tensor_dtype(metadata, item.entry)?;
                        wanted.push(Piece::tensor(item.entry, *chunk, region.clone()), dtype);
                    }
                    _ => objects.push(item.entry),
                }
            }
            messages.push_back(match (wanted.is_empty(), objects.is_empty()) {
                (false, true) => Self::Tensors(wanted),
                (true, false) => Self::Objects(objects),
                _ => return Err(bad_message("it has tensors and objects")),
            });
        }
        Ok(messages)
    }

    /// The message with everything in it.
    pub(crate) async fn read(
        self,
        reader: &Arc<dyn StorageReader>,
        metadata: &Arc<CheckpointMetadata>,
    ) -> Result<(Bytes, ReadReport), CheckpointError> {
        match self {
            Self::Tensors(wanted) => wanted.read(reader, metadata).await,
            Self::Objects(entries) => Wanted::objects(&entries, reader, metadata).await,
        }
    }
}

/// Memory by leaf for the elements; the objects as they come.
#[derive(Debug)]
pub(crate) struct Collector {
    views: Vec<TensorView>,
    objects: Mutex<Vec<(u32, Value)>>,
}

impl Collector {
    pub(crate) fn new(views: Vec<TensorView>) -> Self {
        Self { views, objects: Mutex::default() }
    }

    /// The objects that came, each with the leaf that it is for.
    pub(crate) fn take_objects(&self) -> Vec<(u32, Value)> {
        std::mem::take(&mut *self.objects.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl DataSink for Collector {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let view = self.views.get(item.leaf as usize).cloned();
        view.ok_or_else(|| item.unrequested().into())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).push((item.leaf, value));
        Ok(())
    }
}
