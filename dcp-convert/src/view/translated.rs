//! Items of an inner reader as those that a caller knows.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointError, DataSink, ReadItem, TensorView, Value};

/// Gives a sink the items that it asked for, and not those of the inner reader.
#[derive(Debug)]
pub(super) struct Translated {
    sink: Arc<dyn DataSink>,
    outward: Arc<HashMap<u32, u32>>,
}

impl Translated {
    /// `outward` gives the entry here for one of the inner reader.
    pub(super) fn new(sink: Arc<dyn DataSink>, outward: Arc<HashMap<u32, u32>>) -> Self {
        Self { sink, outward }
    }

    fn item(&self, item: &ReadItem) -> ReadItem {
        let entry = self.outward.get(&item.entry).copied().unwrap_or(item.entry);
        ReadItem { entry, ..item.clone() }
    }
}

impl DataSink for Translated {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.sink.destination(&self.item(item))
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        self.sink.commit(&self.item(item))
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.sink.object(&self.item(item), value)
    }
}
