//! Encodes save plans, in a few bytes per item.

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::dims::Dims;
use crate::error::PlanError;
use crate::key::Key;
use crate::plan::{PlanKey, SavePlan, TensorSpec, Unoffered, WriteOrder, WritePlan};
use crate::region::Region;

const SAVE_PLAN: &[u8; 4] = b"dsp1";
const WRITE_PLAN: &[u8; 4] = b"dwp1";

impl SavePlan {
    /// Encodes the plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*SAVE_PLAN);
        out.number(self.keys.len() as u64);
        for key in &self.keys {
            out.text(&key.fqn);
            out.path(key.path.as_ref());
            match &key.tensor {
                None => out.number(0),
                Some(spec) => {
                    out.number(1 + u64::from(spec.sharded));
                    out.dtype(spec.dtype);
                    out.number(spec.shape.ndim() as u64);
                    spec.shape.iter().for_each(|size| out.number(*size));
                }
            }
        }
        out.number(self.item_keys.len() as u64);
        for item in self.items() {
            out.number(item.key_index as u64);
            if item.is_tensor() {
                item.offsets.iter().chain(item.sizes).for_each(|n| out.number(*n));
            } else {
                out.number(item.byte_len);
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
        let mut input = MessageReader::new(bytes, *SAVE_PLAN)?;
        let mut plan = SavePlan::new();
        for _ in 0..input.count()? {
            let fqn = input.text()?.into();
            let path = input.path()?;
            let tensor = match input.number()? {
                0 => None,
                kind @ (1 | 2) => {
                    let dtype = input.dtype()?;
                    let shape =
                        (0..input.count()?)
                            .map(|_| input.number())
                            .collect::<Result<Dims, PlanError>>()?;
                    Some(TensorSpec { dtype, shape, sharded: kind == 2 })
                }
                other => return Err(bad(format!("unknown kind of key {other}"))),
            };
            plan.keys.push(PlanKey { fqn, path, tensor });
        }
        for _ in 0..input.count()? {
            let key = input.number()?;
            let spec = usize::try_from(key)
                .ok()
                .and_then(|index| plan.keys.get(index))
                .ok_or_else(|| bad(format!("item of key {key} of {}", plan.keys.len())))?
                .tensor
                .as_ref();
            plan.item_keys.push(u32::try_from(key).map_err(|_| bad("too many keys"))?);
            match spec {
                None => plan.item_data.push(input.number()?),
                Some(spec) => {
                    plan.item_data.push(plan.geometry.len() as u64);
                    for _ in 0..2 * spec.shape.ndim() {
                        plan.geometry.push(input.number()?);
                    }
                }
            }
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
        // `item` refuses overflows, so every row must return.
        if plan.items().count() != plan.len() {
            return Err(bad("a chunk larger than 64 bits can count"));
        }
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
        for order in &self.orders {
            out.number(order.item.into());
            out.placement(&order.placement);
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
        for _ in 0..input.count()? {
            let item = input.number()?;
            let item = u32::try_from(item).map_err(|_| bad("item out of range"))?;
            let placement = input.placement(plan.files.len(), plan.encodings.len())?;
            plan.orders.push(WriteOrder { item, placement });
        }
        input.finish()?;
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::metadata::{Encoding, FileId, Placement};
    use crate::path::{PathItem, StatePath};

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
            orders: vec![WriteOrder { item: 9, placement }],
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
