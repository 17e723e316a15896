//! The layout of a staged state in one arena.

use std::collections::HashMap;
use std::sync::Arc;
use std::vec;

use bytes::Bytes;
use dcp_core::tensor::ShardData;
use dcp_core::value::{Dict, Object};
use dcp_core::{CheckpointError, HostMemory, PlanError, Shard, Tensor, TensorView, Value};

use super::copy::{CopyJob, copy_all};
use crate::device::{DeviceElements, wait_for};

/// Copies go to multiples of this many bytes, as wide loads and direct I/O like it.
const ALIGNMENT: u64 = 64;

/// The place of each shard's copy, in the order of the state dict.
#[derive(Default)]
pub(super) struct Layout {
    places: Vec<Place>,
    copies: Vec<(u64, Original)>,
    /// Byte offsets of the copies of contiguous elements, by address and length of the elements.
    offsets: HashMap<(usize, u64), u64>,
    /// Byte offsets of the copies of elements on devices, by address of the device's memory.
    device_offsets: HashMap<(usize, u64), u64>,
    len: u64,
}

/// The original of a copy.
enum Original {
    Host(TensorView, Bytes),
    Device(DeviceElements, String),
}

impl Original {
    fn byte_len(&self) -> u64 {
        match self {
            Self::Host(view, _) => view.byte_len(),
            Self::Device(elements, _) => elements.byte_len(),
        }
    }
}

/// The memory of a shard in a staged state.
#[derive(Clone, Copy)]
enum Place {
    /// The shard's own.
    Shared,
    /// The arena's, from this byte.
    Copied(u64),
}

impl Layout {
    /// The layout of `state`, whose memory is lent for reading until it is copied.
    pub(super) fn of(state: &Dict) -> Result<Self, CheckpointError> {
        let mut layout = Self::default();
        layout.dict(state, "")?;
        Ok(layout)
    }

    /// The length of the arena.
    pub(super) fn byte_len(&self) -> u64 {
        self.len
    }

    /// The state with tensors over the copies in `arena`.
    pub(super) fn staged(
        self,
        state: &Dict,
        arena: Option<&HostMemory>,
    ) -> Result<Dict, CheckpointError> {
        Copied { places: self.places.into_iter(), arena }.dict(state)
    }

    fn dict(&mut self, dict: &Dict, path: &str) -> Result<(), CheckpointError> {
        dict.iter().try_for_each(|(key, value)| {
            let name = key.as_str().unwrap_or("?");
            self.value(value, &format!("{path}.{name}"))
        })
    }

    fn value(&mut self, value: &Value, path: &str) -> Result<(), CheckpointError> {
        let mut all = |items: &[Value]| items.iter().try_for_each(|item| self.value(item, path));
        match value {
            Value::Tensor(tensor) => {
                tensor.shards().iter().try_for_each(|shard| self.shard(shard, path))
            }
            Value::Dict(dict) => self.dict(dict, path),
            Value::List(items)
            | Value::Tuple(items)
            | Value::Set(items)
            | Value::FrozenSet(items) => all(items),
            Value::Object(object) => {
                all(&object.args)?;
                object.state.iter().try_for_each(|state| self.value(state, path))?;
                object.items.iter().try_for_each(|item| self.value(item, path))?;
                object.entries.iter().try_for_each(|(key, value)| {
                    self.value(key, path)?;
                    self.value(value, path)
                })
            }
            _ => Ok(()),
        }
    }

    fn shard(&mut self, shard: &Shard, path: &str) -> Result<(), CheckpointError> {
        let fqn = || path.trim_start_matches('.').to_owned();
        if shard.byte_len() == 0 {
            self.places.push(Place::Shared);
            return Ok(());
        }
        let view = match shard.data() {
            ShardData::Device(memory) => {
                let address = Arc::as_ptr(memory).addr();
                let elements = (address, shard.byte_len());
                let start = match self.device_offsets.get(&elements) {
                    Some(start) => *start,
                    None => {
                        let original = DeviceElements::of_shard(shard, memory);
                        self.copy(Original::Device(original, fqn()))
                    }
                };
                self.device_offsets.insert(elements, start);
                self.places.push(Place::Copied(start));
                return Ok(());
            }
            _ => shard.host_view(&fqn())?,
        };
        // What a scope borrowed does not outlive it.
        if view.memory().is_read_only() && !view.memory().is_borrowed() {
            self.places.push(Place::Shared);
            return Ok(());
        }
        let failed = |source| CheckpointError::Memory { fqn: fqn(), source };
        let bytes = view.memory().read().map_err(failed)?;
        let elements = view.is_contiguous().then(|| {
            let start = view.runs().next().map_or(0, |run| run.start);
            (bytes.as_ptr().addr() + start, view.byte_len())
        });
        if let Some(start) = elements.and_then(|elements| self.offsets.get(&elements)) {
            self.places.push(Place::Copied(*start));
            return Ok(());
        }
        let start = self.copy(Original::Host(view.clone(), bytes));
        self.offsets.extend(elements.map(|elements| (elements, start)));
        self.places.push(Place::Copied(start));
        Ok(())
    }

    /// Adds a copy, and returns its place in the arena.
    fn copy(&mut self, original: Original) -> u64 {
        let start = self.len;
        // Saturation is refused by the allocation.
        let end = start.saturating_add(original.byte_len());
        self.len = end.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT);
        self.copies.push((start, original));
        start
    }

    /// Copies all elements to their places in `arena`.
    pub(super) fn copy_into(
        &mut self,
        arena: &HostMemory,
        threads: usize,
    ) -> Result<(), CheckpointError> {
        let failed = |source| CheckpointError::Memory { fqn: "the staged copy".into(), source };
        let len = usize::try_from(self.len).unwrap_or(usize::MAX);
        let mut target = arena.lend(0..len).map_err(failed)?;
        let mut rest: &mut [u8] = &mut target;
        let mut at = 0;
        let mut jobs = Vec::with_capacity(self.copies.len());
        let mut from_devices = Vec::new();
        for (start, original) in self.copies.drain(..) {
            // Both are within the arena, whose length is a `usize`.
            let (gap, len) = ((start - at) as usize, original.byte_len() as usize);
            let (copy, after) = rest.split_at_mut(gap).1.split_at_mut(len);
            rest = after;
            at = start + original.byte_len();
            match original {
                Original::Host(view, bytes) => jobs.push(CopyJob::new(view, bytes, copy)),
                Original::Device(elements, fqn) => from_devices.push((elements, fqn, copy)),
            }
        }
        copy_all(jobs, threads);
        if from_devices.is_empty() {
            return Ok(());
        }
        wait_for(async move {
            for (elements, fqn, copy) in from_devices {
                elements.read_into(&fqn, copy).await?;
            }
            Ok(())
        })
    }
}

/// Builds the staged state: the same values, with tensors over the copies.
struct Copied<'a> {
    places: vec::IntoIter<Place>,
    arena: Option<&'a HostMemory>,
}

impl Copied<'_> {
    fn dict(&mut self, dict: &Dict) -> Result<Dict, CheckpointError> {
        dict.iter().map(|(key, value)| Ok((key.clone(), self.value(value)?))).collect()
    }

    fn all(&mut self, items: &[Value]) -> Result<Vec<Value>, CheckpointError> {
        items.iter().map(|item| self.value(item)).collect()
    }

    fn value(&mut self, value: &Value) -> Result<Value, CheckpointError> {
        Ok(match value {
            Value::Tensor(tensor) => Value::Tensor(self.tensor(tensor)?),
            Value::Dict(dict) => Value::Dict(self.dict(dict)?),
            Value::List(items) => Value::List(self.all(items)?),
            Value::Tuple(items) => Value::Tuple(self.all(items)?),
            Value::Set(items) => Value::Set(self.all(items)?),
            Value::FrozenSet(items) => Value::FrozenSet(self.all(items)?),
            Value::Object(object) => Value::Object(Box::new(self.object(object)?)),
            // All else is immutable.
            other => other.clone(),
        })
    }

    fn object(&mut self, object: &Object) -> Result<Object, CheckpointError> {
        let mut copied = object.clone();
        for part in copied.args.iter_mut().chain(&mut copied.state).chain(&mut copied.items) {
            *part = self.value(part)?;
        }
        for (key, value) in &mut copied.entries {
            *key = self.value(key)?;
            *value = self.value(value)?;
        }
        Ok(copied)
    }

    fn tensor(&mut self, tensor: &Tensor) -> Result<Tensor, CheckpointError> {
        let shards = tensor.shards().iter().map(|shard| self.shard(shard));
        let shards = shards.collect::<Result<Vec<_>, PlanError>>()?;
        let copied = match &*shards {
            [shard] if !tensor.is_sharded() => match shard.view() {
                Some(view) => Tensor::from_view(view.clone()),
                // Without elements, on a device.
                None => return Ok(tensor.clone()),
            },
            _ => Tensor::sharded(tensor.dtype(), tensor.shape().clone(), shards),
        };
        Ok(copied?)
    }

    fn shard(&mut self, shard: &Shard) -> Result<Shard, PlanError> {
        match (self.places.next(), self.arena) {
            (Some(Place::Copied(start)), Some(arena)) => {
                let (dtype, shape) = (shard.dtype(), shard.region().sizes().clone());
                // The copy is within the arena, whose length is a `usize`.
                let view =
                    TensorView::contiguous(HostMemory::clone(arena), dtype, shape, start as usize)?;
                Ok(Shard::with_view(shard.region().clone(), view)?)
            }
            _ => Ok(shard.clone()),
        }
    }
}
