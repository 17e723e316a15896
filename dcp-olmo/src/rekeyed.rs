//! Presents entries of another reader under other names, any number of times, together with values
//! in memory.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::StateProblem;
use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement};
use dcp_core::path::StatePath;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, PlanError, StorageReader, TensorView, Value,
};

/// The origin of an entry: an entry of the inner reader by its position.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// That entry.
    Entry(usize),
    /// A value made from that object.
    Made(usize, Value),
}

/// An entry to present.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    pub(crate) fqn: Arc<str>,
    pub(crate) path: Option<StatePath>,
    pub(crate) origin: Origin,
}

/// A reader that presents entries of another one.
#[derive(Debug)]
pub(crate) struct Rekeyed {
    inner: Arc<dyn StorageReader>,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    origins: Vec<Origin>,
}

impl Rekeyed {
    pub(crate) fn new(
        inner: Arc<dyn StorageReader>,
        inner_metadata: Arc<CheckpointMetadata>,
        shown: Vec<Shown>,
    ) -> Result<Self, CheckpointError> {
        let mut metadata = CheckpointMetadata::new();
        *metadata.provenance_mut() = inner_metadata.provenance().clone();
        let full = || FormatError::new("index", "it has too many files or encodings");
        // In the same order they get the same ids, so placements stay as they are.
        for file in inner_metadata.files() {
            metadata.intern_file(file).ok_or_else(full)?;
        }
        for encoding in inner_metadata.encodings() {
            metadata.intern_encoding(encoding).ok_or_else(full)?;
        }
        let mut origins = Vec::with_capacity(shown.len());
        for Shown { fqn, path, origin } in shown {
            let (Origin::Entry(from) | Origin::Made(from, _)) = origin;
            let entry = inner_metadata.at(from).map(|(_, entry)| entry.clone());
            let mut entry = entry.ok_or_else(|| missing(&fqn))?;
            if let Origin::Made(..) = origin {
                let encoding = metadata.intern_encoding(&Encoding::new(Layout::Computed));
                let encoding = encoding.ok_or_else(full)?;
                let placement = entry.as_object().and_then(|object| object.placement);
                let placement = placement.map(|place| Placement { encoding, ..place });
                entry = Entry::Object(ObjectEntry::new(placement));
            }
            match &mut entry {
                Entry::Tensor(tensor) => tensor.path = path,
                Entry::Object(object) => object.path = path,
                _ => {}
            }
            if metadata.insert(Arc::clone(&fqn), entry) != origins.len() {
                return Err(StateProblem::Duplicate.of(fqn.to_string()).into());
            }
            origins.push(origin);
        }
        Ok(Self { inner, inner_metadata, metadata: Arc::new(metadata), origins })
    }
}

#[async_trait]
impl StorageReader for Rekeyed {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut inner = LoadPlan::default();
        // For every item of the inner plan, those that were requested.
        let mut requested: Vec<Vec<ReadItem>> = Vec::new();
        let mut objects: HashMap<usize, usize> = HashMap::new();
        for item in &plan.items {
            let from = match self.origins.get(item.entry as usize) {
                Some(Origin::Entry(from)) => *from,
                Some(Origin::Made(_, value)) => {
                    sink.object(item, value.clone())?;
                    continue;
                }
                None => return Err(no_entry(item.entry)),
            };
            // An object that is wanted under many names is read once.
            let known = objects.get(&from).filter(|_| item.kind == ReadKind::Object);
            if let Some(items) = known.and_then(|at| requested.get_mut(*at)) {
                items.push(item.clone());
                continue;
            }
            let too_many = |_| no_entry(item.entry);
            let leaf = u32::try_from(requested.len()).map_err(too_many)?;
            let entry = u32::try_from(from).map_err(too_many)?;
            if item.kind == ReadKind::Object {
                objects.insert(from, requested.len());
            }
            inner.items.push(ReadItem { entry, leaf, kind: item.kind.clone() });
            requested.push(vec![item.clone()]);
        }
        if inner.items.is_empty() {
            return Ok(ReadReport::default());
        }
        let sink = Arc::new(Forwarded { sink, requested });
        self.inner.read(&self.inner_metadata, &inner, sink).await
    }
}

fn missing(fqn: &str) -> CheckpointError {
    PlanError::Missing { fqns: vec![fqn.to_owned()] }.into()
}

fn no_entry(entry: u32) -> CheckpointError {
    PlanError::no_entry(entry.into(), None).into()
}

/// Gives a sink the items that it requested; those of the inner plan are numbered by their leaf.
#[derive(Debug)]
struct Forwarded {
    sink: Arc<dyn DataSink>,
    requested: Vec<Vec<ReadItem>>,
}

impl Forwarded {
    fn items(&self, item: &ReadItem) -> &[ReadItem] {
        self.requested.get(item.leaf as usize).map_or(&[], Vec::as_slice)
    }

    /// The requested elements, in the region that the reader names: it may read in parts.
    fn tensor_item(&self, item: &ReadItem) -> Result<ReadItem, CheckpointError> {
        let requested = self.items(item).first();
        let requested = requested.ok_or_else(|| item.unrequested())?;
        Ok(ReadItem { entry: requested.entry, leaf: requested.leaf, kind: item.kind.clone() })
    }
}

impl DataSink for Forwarded {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.sink.destination(&self.tensor_item(item)?)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        self.sink.commit(&self.tensor_item(item)?)
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        for requested in self.items(item) {
            self.sink.object(requested, value.clone())?;
        }
        Ok(())
    }
}
