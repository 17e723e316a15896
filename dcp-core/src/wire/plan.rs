//! Encodes save plans, in a few bytes per item.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad, plan_keys};
use crate::dims::checked_volume;
use crate::error::PlanError;
use crate::key::Key;
use crate::metadata::{FileId, Placement};
use crate::plan::{PlanKey, SavePlan, Unoffered, WriteOrder, WritePlan};
use crate::region::Region;

const SAVE_PLAN: &[u8; 4] = b"dsp2";
const WRITE_PLAN: &[u8; 4] = b"dwp2";
/// In place of the number of a region or a length: it was not sent before, and follows.
const NEW: u64 = 0;

/// Finds or decodes the table of keys in a message.
type KeyTables<'f, 'a> = dyn FnMut(&'a [u8]) -> Result<Arc<Vec<PlanKey>>, PlanError> + 'f;

/// A region that an earlier item of the message has.
#[derive(Clone, Copy)]
struct SentRegion {
    start: u64,
    ndim: usize,
    volume: u64,
}

fn too_large() -> PlanError {
    bad("a chunk larger than 64 bits can count")
}

impl SavePlan {
    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*SAVE_PLAN);
        out.bytes(&plan_keys::encode(&self.keys));
        out.number(self.item_keys.len() as u64);
        let mut regions: HashMap<(&[u64], &[u64]), u64> = HashMap::new();
        let mut next = 0;
        for item in self.items() {
            let key = item.key_index as u64;
            let known = match item.is_tensor() {
                true => regions.get(&(item.offsets, item.sizes)).copied(),
                false => None,
            };
            out.number(2 * known.unwrap_or(NEW) + u64::from(key != next));
            if key != next {
                out.number(key);
            }
            next = key.saturating_add(1);
            if !item.is_tensor() {
                out.number(item.byte_len);
            } else if known.is_none() {
                out.numbers(item.offsets);
                out.numbers(item.sizes);
                regions.insert((item.offsets, item.sizes), regions.len() as u64 + 1);
            }
        }
        out.number(self.unoffered.len() as u64);
        for left in &self.unoffered {
            out.text(&left.fqn);
            out.option(left.region.as_ref(), |out, region| {
                out.dims(region.offsets());
                out.dims(region.sizes());
            });
        }
        out.finish()
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a plan of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        Self::decode(bytes, &mut |keys| plan_keys::decode(keys).map(Arc::new))
    }

    /// Decodes the messages of all ranks. Plans whose keys are the same share one table of them.
    ///
    /// # Errors
    ///
    /// When the bytes are not plans of this version.
    pub fn from_wires<M: AsRef<[u8]>>(messages: &[M]) -> Result<Vec<Self>, PlanError> {
        let mut tables: HashMap<&[u8], Arc<Vec<PlanKey>>> = HashMap::new();
        // Those of neighbors mostly are the same, and comparing them is faster than a look-up.
        let mut last: Option<(&[u8], Arc<Vec<PlanKey>>)> = None;
        let mut plans = Vec::with_capacity(messages.len());
        for message in messages {
            plans.push(Self::decode(message.as_ref(), &mut |encoded| {
                if let Some((bytes, keys)) = &last
                    && *bytes == encoded
                {
                    return Ok(Arc::clone(keys));
                }
                let keys = match tables.get(encoded) {
                    Some(keys) => Arc::clone(keys),
                    None => {
                        let keys = Arc::new(plan_keys::decode(encoded)?);
                        tables.insert(encoded, Arc::clone(&keys));
                        keys
                    }
                };
                last = Some((encoded, Arc::clone(&keys)));
                Ok(keys)
            })?);
        }
        Ok(plans)
    }

    fn decode<'a>(bytes: &'a [u8], keys: &mut KeyTables<'_, 'a>) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *SAVE_PLAN)?;
        let mut plan = SavePlan::new();
        plan.keys = keys(input.bytes()?)?;
        let count = input.count()?;
        plan.item_keys.reserve_exact(count);
        plan.item_data.reserve_exact(count);
        let mut regions: Vec<SentRegion> = Vec::new();
        let mut next = 0_u64;
        for _ in 0..count {
            let code = input.number()?;
            let key = if code % 2 == 0 { next } else { input.number()? };
            next = key.saturating_add(1);
            let spec = usize::try_from(key)
                .ok()
                .and_then(|index| plan.keys.get(index))
                .ok_or_else(|| bad(format!("item of key {key} of {}", plan.keys.len())))?
                .tensor
                .as_ref();
            plan.item_keys.push(u32::try_from(key).map_err(|_| bad("too many keys"))?);
            let Some(spec) = spec else {
                plan.item_data.push(input.number()?);
                continue;
            };
            let ndim = spec.shape.ndim();
            let region = match (code / 2).checked_sub(1) {
                None => {
                    let start = plan.geometry.len();
                    for _ in 0..2 * ndim {
                        plan.geometry.push(input.number()?);
                    }
                    let sizes = plan.geometry.get(start + ndim..).unwrap_or_default();
                    let volume = checked_volume(sizes).ok_or_else(too_large)?;
                    let region = SentRegion { start: start as u64, ndim, volume };
                    regions.push(region);
                    region
                }
                Some(at) => {
                    let known = usize::try_from(at).ok().and_then(|at| regions.get(at));
                    let known = known.filter(|region| region.ndim == ndim);
                    *known.ok_or_else(|| bad("it refers to a region that was not sent"))?
                }
            };
            region.volume.checked_mul(spec.dtype.size() as u64).ok_or_else(too_large)?;
            plan.item_data.push(region.start);
        }
        for _ in 0..input.count()? {
            let fqn = input.text()?.into();
            let region = input.option(|input| {
                let (offsets, sizes) = (input.dims()?, input.dims()?);
                Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))
            })?;
            plan.unoffered.push(Unoffered { fqn, region });
        }
        input.finish()?;
        Ok(plan)
    }

    /// A 128-bit fingerprint of the plan: equal for equal plans, on every machine. It covers dtypes
    /// and paths too; ranks compare it with that of the last save.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        crate::digest::fnv1a_128(&self.to_wire())
    }
}

impl WritePlan {
    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*WRITE_PLAN);
        out.number(self.files.len() as u64);
        self.files.iter().for_each(|file| out.text(file.as_str()));
        out.number(self.encodings.len() as u64);
        for encoding in &self.encodings {
            out.encoding(encoding);
        }
        out.number(self.orders.len() as u64);
        let mut lens: HashMap<u64, u64> = HashMap::new();
        let mut last = None;
        for order in &self.orders {
            let WriteOrder { item, placement } = *order;
            let known = lens.get(&placement.byte_len).copied();
            // Most items follow each other in the plan and in the file.
            let follows = last.and_then(following) == Some((item, place_of(&placement)));
            out.number(2 * known.unwrap_or(NEW) + u64::from(!follows));
            if !follows {
                out.number(item.into());
                out.number(placement.file.index() as u64);
                out.number(placement.encoding.into());
                out.number(placement.byte_offset);
            }
            if known.is_none() {
                out.number(placement.byte_len);
                lens.insert(placement.byte_len, lens.len() as u64 + 1);
            }
            last = Some(*order);
        }
        out.finish()
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a plan of this version, or name a file outside the checkpoint.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *WRITE_PLAN)?;
        let mut plan = WritePlan::default();
        for _ in 0..input.count()? {
            plan.files.push(Key::new(input.text()?).map_err(|error| bad(error.to_string()))?);
        }
        for _ in 0..input.count()? {
            plan.encodings.push(input.encoding()?);
        }
        let mut lens = Vec::new();
        for _ in 0..input.count()? {
            let code = input.number()?;
            let (item, (file, encoding, byte_offset)) = if code % 2 == 0 {
                let last = plan.orders.last().copied();
                last.and_then(following).ok_or_else(|| bad("an item that follows none"))?
            } else {
                let item = input.number()?;
                let item = u32::try_from(item).map_err(|_| bad("item out of range"))?;
                (item, input.place(plan.files.len(), plan.encodings.len())?)
            };
            let byte_len = match (code / 2).checked_sub(1) {
                None => {
                    let len = input.number()?;
                    lens.push(len);
                    len
                }
                Some(at) => {
                    let known = usize::try_from(at).ok().and_then(|at| lens.get(at));
                    *known.ok_or_else(|| bad("it refers to a length that was not sent"))?
                }
            };
            let placement = Placement { file, encoding, byte_offset, byte_len };
            plan.orders.push(WriteOrder { item, placement });
        }
        input.finish()?;
        Ok(plan)
    }
}

/// File, encoding and offset.
type Place = (FileId, u16, u64);

fn place_of(placement: &Placement) -> Place {
    (placement.file, placement.encoding, placement.byte_offset)
}

/// The item and the place after an order, in the plan and in the file.
fn following(order: WriteOrder) -> Option<(u32, Place)> {
    let Placement { file, encoding, byte_offset, byte_len } = order.placement;
    let end = byte_offset.checked_add(byte_len)?;
    Some((order.item.checked_add(1)?, (file, encoding, end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::metadata::Encoding;
    use crate::path::{PathItem, StatePath};
    use crate::plan::TensorSpec;

    fn plan() -> SavePlan {
        let mut plan = SavePlan::new();
        let spec = TensorSpec { dtype: DType::BFloat16, shape: [1 << 40, 3].into(), sharded: true };
        let path: StatePath = [PathItem::Key("a".into()), PathItem::Index(300)].into();
        let tensor =
            plan.push_key(PlanKey { fqn: "a.é".into(), path: Some(path), tensor: Some(spec) });
        let object = plan.push_key(PlanKey { fqn: "".into(), path: None, tensor: None });
        plan.push_chunk(tensor, &Region::new([5, 0], [1 << 33, 3]).unwrap()).unwrap();
        plan.push_object(object, 1261).unwrap();
        plan.push_chunk(tensor, &Region::new([0, 0], [5, 3]).unwrap()).unwrap();
        let region = Some(Region::new([7], [1 << 40]).unwrap());
        plan.unoffered = vec![
            Unoffered { fqn: "b".into(), region },
            Unoffered { fqn: "c".into(), region: None },
        ];
        plan
    }

    #[test]
    fn save_plans_round_trip() {
        let plan = plan();
        let wire = plan.to_wire();
        let back = SavePlan::from_wire(&wire).unwrap();
        assert_eq!(back.keys, plan.keys);
        assert_eq!(back.unoffered, plan.unoffered);
        assert_eq!(back.to_wire(), wire);
        assert_eq!(back.item(1).unwrap().byte_len, 1261);
        assert_eq!(back.item(2).unwrap().byte_len, 30);
        assert_eq!(back.fingerprint(), plan.fingerprint());
    }

    #[test]
    fn plans_with_the_same_keys_share_them() {
        let one = plan();
        let mut other = plan();
        other.push_key(PlanKey { fqn: "z".into(), path: None, tensor: None });
        let wires = [&one, &one, &other, &one].map(SavePlan::to_wire);
        let back = SavePlan::from_wires(&wires).unwrap();
        let shares = |at: usize| back[0].shares_keys_with(&back[at]);
        assert_eq!([1, 2, 3].map(shares), [true, false, true]);
        assert_eq!(back.iter().map(SavePlan::to_wire).collect::<Vec<_>>(), wires);
        let mut changed = back[1].clone();
        changed.push_key(PlanKey { fqn: "y".into(), path: None, tensor: None });
        assert_eq!(back[0].keys().len() + 1, changed.keys().len());
    }

    /// 73 kB in PyTorch 2.15.
    #[test]
    fn the_plan_of_500_shards_is_small() {
        let mut plan = SavePlan::new();
        let mut write =
            WritePlan { files: vec![Key::new("__37_0.distcp").unwrap()], ..WritePlan::default() };
        write.encodings.push(Encoding::default());
        let mut byte_offset = 0;
        for n in 0..500_u64 {
            let name = format!("layers.{}.mlp.part{}.weight", n / 5, n % 5);
            let shape = [8192, 4096 * (1 + n % 5)];
            let spec = TensorSpec { dtype: DType::BFloat16, shape: shape.into(), sharded: true };
            let path = [PathItem::Key("model".into()), PathItem::Key(name.as_str().into())];
            let fqn = format!("model.{name}").into();
            let key = plan.push_key(PlanKey { fqn, path: Some(path.into()), tensor: Some(spec) });
            let region = Region::new([8 * 37, 0], [8, shape[1]]).unwrap();
            plan.push_chunk(key, &region).unwrap();
            let byte_len = region.volume() * 2 + 1577;
            let file = FileId::from_index(0).unwrap();
            let placement = Placement { file, encoding: 0, byte_offset, byte_len };
            write.orders.push(WriteOrder { item: n as u32, placement });
            byte_offset += byte_len;
        }
        let (sent, received) = (plan.to_wire(), write.to_wire());
        assert_eq!(SavePlan::from_wire(&sent).unwrap().to_wire(), sent);
        assert_eq!(WritePlan::from_wire(&received), Ok(write));
        assert!(sent.len() + received.len() < 7300, "{} and {}", sent.len(), received.len());
    }

    #[test]
    fn write_plans_round_trip() {
        let placement = Placement {
            file: FileId::from_index(1).unwrap(),
            encoding: 0,
            byte_offset: u64::MAX,
            byte_len: 0,
        };
        let plan = WritePlan {
            files: vec![Key::new("a").unwrap(), Key::new("b/c").unwrap()],
            encodings: vec![Encoding::default().with_transforms(["stream.zstd/1".into()])],
            orders: vec![
                WriteOrder { item: 9, placement },
                WriteOrder { item: 10, placement },
                WriteOrder {
                    item: 11,
                    placement: Placement { byte_offset: 3, byte_len: 8, ..placement },
                },
                WriteOrder {
                    item: 12,
                    placement: Placement { byte_offset: 11, byte_len: 8, ..placement },
                },
                WriteOrder {
                    item: u32::MAX,
                    placement: Placement { byte_offset: 19, byte_len: 0, ..placement },
                },
                WriteOrder {
                    item: 0,
                    placement: Placement { byte_offset: 19, byte_len: 2, ..placement },
                },
            ],
        };
        assert_eq!(WritePlan::from_wire(&plan.to_wire()), Ok(plan));
    }

    #[test]
    fn damaged_messages_are_refused_without_a_panic() {
        let wire = plan().to_wire();
        for len in 0..wire.len() {
            assert!(SavePlan::from_wire(&wire[..len]).is_err(), "{len}");
        }
        for at in 0..wire.len() {
            for bit in 0..8 {
                let mut damaged = wire.to_vec();
                damaged[at] ^= 1 << bit;
                let _ = SavePlan::from_wire(&damaged);
                let _ = WritePlan::from_wire(&damaged);
            }
        }
        let huge = [&SAVE_PLAN[..], &[0xff; 9], &[1]].concat();
        assert!(SavePlan::from_wire(&huge).is_err());
    }
}
