//! Encodes what of a save plan mostly is the same on many ranks: names, dtypes, shapes, and which
//! items have the same region.

use std::collections::HashMap;
use std::sync::Arc;

use super::plan_values::{self, Chunk};
use super::{MessageReader, MessageWriter, bad, plan_keys};
use crate::error::PlanError;
use crate::plans::plan::{PlanKey, PlanOutline, SavePlan};
use crate::tensors::dims::Dims;

/// In place of the number of a region: no earlier item of a tensor of this shape has it.
const NEW: u64 = 0;

/// Finds or decodes the table of keys in an outline.
pub(super) type KeyTables<'f, 'a> =
    dyn FnMut(&'a [u8]) -> Result<Arc<Vec<PlanKey>>, PlanError> + 'f;

/// A decoded outline, and the form that the values of one rank must have.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) shared: Arc<PlanOutline>,
    pub(super) slots: Vec<Slot>,
    pub(super) objects: usize,
    /// The numbers of all slots.
    pub(super) numbers: usize,
    /// The name of what is not offered, and the axes of its region.
    pub(super) unoffered: Vec<(Arc<str>, Option<usize>)>,
}

/// The place of an object's length, or of a region that items of one shape share.
#[derive(Debug)]
pub(super) struct Slot {
    /// `None` for an object.
    pub(super) shape: Option<Dims>,
    /// The size of the largest dtype of its items, in bytes.
    pub(super) dtype_size: u64,
    start: u64,
}

impl Slot {
    pub(super) fn ndim(&self) -> usize {
        self.shape.as_ref().map_or(0, Dims::ndim)
    }
}

impl Outline {
    pub(super) fn chunks(&self) -> usize {
        self.slots.len() - self.objects
    }

    pub(super) fn unoffered_numbers(&self) -> usize {
        self.unoffered.iter().filter_map(|(_, ndim)| ndim.map(|ndim| 2 * ndim)).sum()
    }
}

/// The outline and the values of a plan.
pub(super) fn encode(plan: &SavePlan) -> (Vec<u8>, Vec<u8>) {
    let mut out = MessageWriter(Vec::new());
    out.bytes(&plan_keys::encode(plan.keys()));
    out.number(plan.len() as u64);
    let mut known: HashMap<Chunk<'_>, u64> = HashMap::new();
    let (mut objects, mut chunks) = (Vec::new(), Vec::new());
    let mut next = 0;
    for item in plan.items() {
        let key = item.key_index as u64;
        let mut code = NEW;
        match &item.key.tensor {
            None => objects.push(item.byte_len),
            Some(spec) => {
                let chunk = Chunk { shape: &spec.shape, offsets: item.offsets, sizes: item.sizes };
                let number = known.len() as u64 + 1;
                let first = *known.entry(chunk).or_insert(number);
                if first == number {
                    chunks.push(chunk);
                } else {
                    code = first;
                }
            }
        }
        out.number(2 * code + u64::from(key != next));
        if key != next {
            out.number(key);
        }
        next = key.saturating_add(1);
    }
    out.number(plan.unoffered.len() as u64);
    for left in plan.unoffered() {
        out.text(&left.fqn);
        out.number(left.region.as_ref().map_or(0, |region| region.ndim() as u64 + 1));
    }
    let regions = plan.unoffered().iter().filter_map(|left| left.region.as_ref());
    let mut values = MessageWriter(Vec::new());
    plan_values::encode(&mut values, &objects, &chunks, regions);
    (out.0, values.0)
}

impl Outline {
    pub(super) fn decode<'a>(
        bytes: &'a [u8],
        keys: &mut KeyTables<'_, 'a>,
    ) -> Result<Self, PlanError> {
        let mut input = MessageReader(bytes);
        let keys = keys(input.bytes()?)?;
        let count = input.count()?;
        let mut outline = Self {
            shared: Arc::default(),
            slots: Vec::new(),
            objects: 0,
            numbers: 0,
            unoffered: Vec::new(),
        };
        let (mut item_keys, mut item_values) =
            (Vec::with_capacity(count), Vec::with_capacity(count));
        // The slots of regions.
        let mut regions = Vec::new();
        let mut next = 0_u64;
        for _ in 0..count {
            let code = input.number()?;
            let key = if code % 2 == 0 { next } else { input.number()? };
            next = key.saturating_add(1);
            let found = usize::try_from(key).ok().and_then(|index| keys.get(index));
            let found = found.ok_or_else(|| bad(format!("item of key {key} of {}", keys.len())))?;
            item_keys.push(u32::try_from(key).map_err(|_| bad("too many keys"))?);
            let start = outline.numbers as u64;
            let Some(spec) = &found.tensor else {
                outline.slots.push(Slot { shape: None, dtype_size: 1, start });
                outline.objects += 1;
                outline.numbers += 1;
                item_values.push(start);
                continue;
            };
            let (shape, dtype_size) = (&spec.shape, spec.dtype.size() as u64);
            if shape.ndim() > Dims::MAX_AXES {
                return Err(bad(format!("a tensor of {} axes", shape.ndim())));
            }
            let Some(at) = (code / 2).checked_sub(1) else {
                regions.push(outline.slots.len());
                outline.slots.push(Slot { shape: Some(shape.clone()), dtype_size, start });
                outline.numbers += 2 * shape.ndim();
                item_values.push(start);
                continue;
            };
            let slot = usize::try_from(at).ok().and_then(|at| regions.get(at));
            let slot = slot.and_then(|slot| outline.slots.get_mut(*slot));
            let slot = slot.filter(|slot| slot.shape.as_ref() == Some(shape));
            let slot = slot.ok_or_else(|| bad("it refers to a region that was not sent"))?;
            slot.dtype_size = slot.dtype_size.max(dtype_size);
            item_values.push(slot.start);
        }
        for _ in 0..input.count()? {
            let fqn = input.text()?.into();
            let ndim = input.number()?.checked_sub(1);
            let ndim = ndim.map(|ndim| {
                let ndim = usize::try_from(ndim).ok().filter(|ndim| *ndim <= Dims::MAX_AXES);
                ndim.ok_or_else(|| bad("a region of too many axes"))
            });
            outline.unoffered.push((fqn, ndim.transpose()?));
        }
        input.finish()?;
        outline.shared = Arc::new(PlanOutline { keys, item_keys, item_values });
        Ok(outline)
    }
}
