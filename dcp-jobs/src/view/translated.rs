//! Translates items of an inner reader to those of the caller.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::checkpoint::DataSink;
use dcp_core::plan::ReadItem;
use dcp_core::{CheckpointError, TensorView, Value};

/// A sink for an inner reader that passes the caller's items to the caller's sink.
#[derive(Debug)]
pub(super) struct Translated {
    sink: Arc<dyn DataSink>,
    outward: Arc<HashMap<u32, u32>>,
}

impl Translated {
    /// `outward` maps an entry of the inner reader to the caller's.
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
