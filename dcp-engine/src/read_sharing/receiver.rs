//! The receiver of an exchange: copies this rank's parts of the messages of others into its own memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Region, TensorView, Value};

use super::exchange_message::Parcel;
use crate::metadata_lookup::{bad_message, object_bytes, tensor_dtype};

/// Copies the parts that this rank's plan requests out of the messages to all.
#[derive(Debug)]
pub(crate) struct Receiver<'a> {
    metadata: &'a CheckpointMetadata,
    sink: &'a Arc<dyn DataSink>,
    /// The items by entry and chunk, with their memory once something arrived.
    tensors: BTreeMap<(u32, u32), Vec<Open<'a>>>,
    objects: BTreeMap<u32, Vec<&'a ReadItem>>,
    /// Elements that nothing has to arrive for.
    empty: Vec<&'a ReadItem>,
    bytes_needed: u64,
    problem: Option<CheckpointError>,
}

/// An item that is being filled.
#[derive(Debug)]
struct Open<'a> {
    item: &'a ReadItem,
    region: &'a Region,
    view: Option<TensorView>,
    /// Elements that are still to come.
    missing: u64,
}

impl<'a> Receiver<'a> {
    pub(crate) fn new(
        metadata: &'a CheckpointMetadata,
        plan: &'a LoadPlan,
        sink: &'a Arc<dyn DataSink>,
    ) -> Self {
        let mut taker = Self {
            metadata,
            sink,
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            empty: Vec::new(),
            bytes_needed: 0,
            problem: None,
        };
        for item in &plan.items {
            match &item.kind {
                ReadKind::Tensor { region, .. } if region.is_empty() => taker.empty.push(item),
                ReadKind::Tensor { chunk, region, .. } => {
                    let open = Open { item, region, view: None, missing: region.volume() };
                    taker.tensors.entry((item.entry, *chunk)).or_default().push(open);
                }
                _ => taker.objects.entry(item.entry).or_default().push(item),
            }
        }
        taker
    }

    /// Takes from a message; an error is kept for the end.
    pub(crate) fn take(&mut self, bytes: &Bytes) {
        if self.problem.is_none() {
            self.problem = self.try_take(bytes).err();
        }
    }

    fn try_take(&mut self, bytes: &Bytes) -> Result<(), CheckpointError> {
        for (piece, data) in Parcel::open(bytes, self.metadata)? {
            match &piece.place {
                Some((chunk, region)) => self.elements(piece.entry, *chunk, region, &data)?,
                None => self.object(piece.entry, &data)?,
            }
        }
        Ok(())
    }

    fn elements(
        &mut self,
        entry: u32,
        chunk: u32,
        sent: &Region,
        data: &Bytes,
    ) -> Result<(), CheckpointError> {
        let Some(opens) = self.tensors.get_mut(&(entry, chunk)) else { return Ok(()) };
        let dtype = tensor_dtype(self.metadata, entry)?;
        let size = dtype.size();
        let outside = || bad_message("it has elements outside of its region");
        for open in opens {
            let Some(part) = open.region.intersect(sent) else { continue };
            let there = part.relative_to(sent.offsets()).ok_or_else(outside)?;
            let place = open.place(&part, self.sink)?;
            let fill = |bytes: &[u8]| {
                let fqn = || self.metadata.entry_name(entry as usize).into_owned();
                let failed = |source| CheckpointError::Memory { fqn: fqn(), source };
                place.fill_from(bytes).map_err(failed)
            };
            if part == *sent {
                fill(data)?;
            } else {
                let mut picked = Vec::with_capacity(usize::try_from(place.byte_len()).unwrap_or(0));
                for (at, len) in there.runs_in(sent.sizes()) {
                    let end = at.saturating_add(len);
                    let range = usize::try_from(at).ok().zip(usize::try_from(end).ok());
                    let (at, end) = range.ok_or_else(outside)?;
                    let run = data.get(at.saturating_mul(size)..end.saturating_mul(size));
                    picked.extend_from_slice(run.ok_or_else(outside)?);
                }
                fill(&picked)?;
            }
            self.bytes_needed = self.bytes_needed.saturating_add(place.byte_len());
            open.arrived(&part, self.sink)?;
        }
        Ok(())
    }

    fn object(&mut self, entry: u32, data: &Bytes) -> Result<(), CheckpointError> {
        if !self.objects.contains_key(&entry) {
            return Ok(());
        }
        self.value(entry, Value::from_wire(data)?)
    }

    /// An object that did not come in a message.
    pub(crate) fn value(&mut self, entry: u32, value: Value) -> Result<(), CheckpointError> {
        let items = self.objects.remove(&entry).unwrap_or_default();
        let byte_len = object_bytes(self.metadata, entry).saturating_mul(items.len() as u64);
        self.bytes_needed = self.bytes_needed.saturating_add(byte_len);
        items.into_iter().try_for_each(|item| self.sink.object(item, value.clone()))
    }

    /// The memory for elements that come in no message; `None` unless exactly one item takes all
    /// of them. The caller then calls [`arrived`](Self::arrived).
    pub(crate) fn place(
        &mut self,
        entry: u32,
        chunk: u32,
        region: &Region,
    ) -> Result<Option<TensorView>, CheckpointError> {
        let Some(opens) = self.tensors.get_mut(&(entry, chunk)) else { return Ok(None) };
        let mut takers = opens.iter_mut().filter(|open| open.region.intersect(region).is_some());
        match (takers.next(), takers.next()) {
            (Some(open), None) if open.region.contains(region) => {
                open.place(region, self.sink).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The elements were written to their [`place`](Self::place).
    pub(crate) fn arrived(
        &mut self,
        entry: u32,
        chunk: u32,
        region: &Region,
    ) -> Result<(), CheckpointError> {
        let size = tensor_dtype(self.metadata, entry)?.size() as u64;
        self.bytes_needed = self.bytes_needed.saturating_add(region.volume().saturating_mul(size));
        let opens = self.tensors.get_mut(&(entry, chunk)).into_iter().flatten();
        let mut takers = opens.filter(|open| open.region.contains(region));
        takers.next().map_or(Ok(()), |open| open.arrived(region, self.sink))
    }

    /// Whether everything has arrived.
    pub(crate) fn finish(self, report: &mut ReadReport) -> Result<(), CheckpointError> {
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        for item in self.empty {
            self.sink.destination(item)?;
            self.sink.commit(item)?;
        }
        let name = |entry: u32| self.metadata.entry_name(entry as usize).into_owned();
        let parts = self.tensors.iter().flat_map(|((entry, _), opens)| {
            let missing = opens.iter().filter(|open| open.missing > 0);
            missing
                .map(|open| (name(*entry), format!("{} elements of {}", open.missing, open.region)))
        });
        let objects = self.objects.keys().map(|entry| (name(*entry), "the value".to_owned()));
        let missing: Vec<PlanError> =
            parts.chain(objects).map(|(fqn, part)| PlanError::unread(fqn, part)).collect();
        if !missing.is_empty() {
            return Err(PlanError::Many(missing).into());
        }
        report.bytes_needed = self.bytes_needed;
        Ok(())
    }
}

impl Open<'_> {
    /// The memory for a part of the item.
    fn place(
        &mut self,
        part: &Region,
        sink: &Arc<dyn DataSink>,
    ) -> Result<TensorView, CheckpointError> {
        let view = match &self.view {
            Some(view) => view,
            None => self.view.insert(sink.destination(self.item)?),
        };
        let inner = part
            .relative_to(self.region.offsets())
            .ok_or_else(|| bad_message("it has elements outside of their item"))?;
        Ok(view.narrow(&inner)?)
    }

    /// A part has come; when it was the last one, the item is done.
    fn arrived(&mut self, part: &Region, sink: &Arc<dyn DataSink>) -> Result<(), CheckpointError> {
        self.missing = self.missing.saturating_sub(part.volume());
        if self.missing == 0 { sink.commit(self.item) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};

    use super::*;

    /// Gives no memory, because nothing comes.
    #[derive(Debug)]
    struct Nowhere;

    impl DataSink for Nowhere {
        fn destination(&self, _: &ReadItem) -> Result<TensorView, CheckpointError> {
            Err(bad_message("no memory"))
        }

        fn commit(&self, _: &ReadItem) -> Result<(), CheckpointError> {
            Ok(())
        }

        fn object(&self, _: &ReadItem, _: Value) -> Result<(), CheckpointError> {
            Ok(())
        }
    }

    #[test]
    fn all_that_did_not_come_is_named() {
        let mut metadata = CheckpointMetadata::new();
        let mut tensor = TensorEntry::new(DType::Int8, [4, 2]);
        tensor.chunks.push(&[0, 0], &[4, 2], None).unwrap();
        metadata.insert("weight", Entry::Tensor(tensor));
        metadata.insert("rng", Entry::Object(ObjectEntry::new(None)));
        let region = Region::new([1, 0], [2, 2]).unwrap();
        let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
        let plan = LoadPlan {
            items: vec![
                ReadItem { entry: 0, leaf: 0, kind },
                ReadItem { entry: 1, leaf: 1, kind: ReadKind::Object },
            ],
        };
        let sink: Arc<dyn DataSink> = Arc::new(Nowhere);
        let error = Receiver::new(&metadata, &plan, &sink).finish(&mut ReadReport::default());
        let text = error.unwrap_err().to_string();
        for part in ["\"weight\"", "4 elements of [1:3, 0:2]", "\"rng\""] {
            assert!(text.contains(part), "{text}");
        }
        let mut taker = Receiver::new(&metadata, &plan, &sink);
        taker.value(1, Value::None).unwrap();
        let text = taker.finish(&mut ReadReport::default()).unwrap_err().to_string();
        assert!(!text.contains("rng"), "{text}");
    }
}
