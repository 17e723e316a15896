//! The compact form in which plans travel between ranks: versioned, columns of LEB128 numbers.
//!
//! A rank's plan is a few bytes per item. Decoding claims no more memory than the message has
//! bytes to fill it with.

use std::sync::Arc;

use bytes::Bytes;

use crate::dims::Dims;
use crate::dtype::DType;
use crate::error::PlanError;
use crate::key::Key;
use crate::metadata::{Encoding, FileId, Layout, PathItem, Placement, StatePath};
use crate::plan::{PlanKey, SavePlan, TensorSpec, WriteOrder, WritePlan};

const SAVE_PLAN: &[u8; 4] = b"dsp1";
const WRITE_PLAN: &[u8; 4] = b"dwp1";

impl SavePlan {
    /// The plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = Sender(SAVE_PLAN.to_vec());
        out.number(self.keys.len() as u64);
        for key in &self.keys {
            out.text(&key.fqn);
            out.path(key.path.as_ref());
            match &key.tensor {
                None => out.number(0),
                Some(spec) => {
                    out.number(1 + u64::from(spec.sharded));
                    out.number(dtype_code(spec.dtype));
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
        out.0.into()
    }

    /// The plan of a message.
    ///
    /// # Errors
    ///
    /// When the bytes are no plan of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = Receiver::new(bytes, *SAVE_PLAN)?;
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
        input.finish()?;
        // `item` refuses what would overflow, so every row must come back.
        if plan.items().count() != plan.len() {
            return Err(bad("a chunk larger than 64 bits can count"));
        }
        Ok(plan)
    }

    /// A 128-bit fingerprint of the plan: equal for equal plans, on every machine. Ranks use it
    /// to see that nothing changed since the last save, dtypes and paths included.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        // FNV-1a: stable, dependency-free, and fed by this process only.
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        self.to_wire()
            .iter()
            .fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
    }
}

impl WritePlan {
    /// The plan as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = Sender(WRITE_PLAN.to_vec());
        out.number(self.files.len() as u64);
        self.files.iter().for_each(|file| out.text(file.as_str()));
        out.number(self.encodings.len() as u64);
        for encoding in &self.encodings {
            out.number(layout_code(encoding.layout));
            out.number(encoding.transforms.len() as u64);
            encoding.transforms.iter().for_each(|transform| out.text(transform));
        }
        out.number(self.orders.len() as u64);
        for order in &self.orders {
            out.number(order.item.into());
            out.number(order.placement.file.index() as u64);
            out.number(order.placement.encoding.into());
            out.number(order.placement.byte_offset);
            out.number(order.placement.byte_len);
        }
        out.0.into()
    }

    /// The plan of a message.
    ///
    /// # Errors
    ///
    /// When the bytes are no plan of this version, or name a file outside the checkpoint.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = Receiver::new(bytes, *WRITE_PLAN)?;
        let mut plan = WritePlan::default();
        for _ in 0..input.count()? {
            plan.files.push(Key::new(input.text()?).map_err(|error| bad(error.to_string()))?);
        }
        for _ in 0..input.count()? {
            let layout = match input.number()? {
                0 => Layout::TorchArchive,
                1 => Layout::Raw,
                2 => Layout::Computed,
                3 => Layout::TorchSave,
                other => return Err(bad(format!("unknown layout {other}"))),
            };
            let transforms = (0..input.count()?)
                .map(|_| input.text().map(Arc::from))
                .collect::<Result<Vec<_>, _>>()?;
            plan.encodings.push(Encoding::new(layout).with_transforms(transforms));
        }
        for _ in 0..input.count()? {
            let item = input.number()?;
            let item = u32::try_from(item).map_err(|_| bad("item out of range"))?;
            let file = usize::try_from(input.number()?)
                .ok()
                .filter(|index| *index < plan.files.len())
                .and_then(FileId::from_index)
                .ok_or_else(|| bad("file out of range"))?;
            let encoding = u16::try_from(input.number()?)
                .ok()
                .filter(|index| usize::from(*index) < plan.encodings.len())
                .ok_or_else(|| bad("encoding out of range"))?;
            let (byte_offset, byte_len) = (input.number()?, input.number()?);
            let placement = Placement { file, encoding, byte_offset, byte_len };
            plan.orders.push(WriteOrder { item, placement });
        }
        input.finish()?;
        Ok(plan)
    }
}

fn bad(problem: impl Into<String>) -> PlanError {
    PlanError::Wire { problem: problem.into() }
}

fn dtype_code(dtype: DType) -> u64 {
    DType::ALL.iter().position(|known| *known == dtype).unwrap_or(usize::MAX) as u64
}

fn layout_code(layout: Layout) -> u64 {
    match layout {
        Layout::TorchArchive => 0,
        Layout::Raw => 1,
        Layout::Computed => 2,
        Layout::TorchSave => 3,
    }
}

struct Sender(Vec<u8>);

impl Sender {
    fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push((n & 0x7f) as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn path(&mut self, path: Option<&StatePath>) {
        let Some(path) = path else { return self.number(0) };
        self.number(path.len() as u64 + 1);
        for item in &**path {
            match item {
                PathItem::Key(key) => {
                    self.number(0);
                    self.text(key);
                }
                PathItem::Index(index) => {
                    self.number(1);
                    self.number(*index);
                }
            }
        }
    }
}

struct Receiver<'a>(&'a [u8]);

impl<'a> Receiver<'a> {
    fn new(bytes: &'a [u8], magic: [u8; 4]) -> Result<Self, PlanError> {
        bytes
            .strip_prefix(&magic)
            .map(Self)
            .ok_or_else(|| bad("another kind or version of message"))
    }

    fn number(&mut self) -> Result<u64, PlanError> {
        let mut n = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first().ok_or_else(|| bad("it ends too early"))?;
            self.0 = rest;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            n |= bits << shift;
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(bad("a number of more than 64 bits"))
    }

    /// A number of things that take at least one byte each, so it cannot exceed what is left.
    fn count(&mut self) -> Result<usize, PlanError> {
        let n = self.number()?;
        usize::try_from(n)
            .ok()
            .filter(|n| *n <= self.0.len())
            .ok_or_else(|| bad(format!("a list of {n} in {} bytes", self.0.len())))
    }

    fn text(&mut self) -> Result<&'a str, PlanError> {
        let len = self.count()?;
        let (text, rest) = self.0.split_at(len);
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| bad("text that is not UTF-8"))
    }

    fn dtype(&mut self) -> Result<DType, PlanError> {
        let code = self.number()?;
        usize::try_from(code)
            .ok()
            .and_then(|code| DType::ALL.get(code))
            .copied()
            .ok_or_else(|| bad(format!("unknown dtype {code}")))
    }

    fn path(&mut self) -> Result<Option<StatePath>, PlanError> {
        let Some(len) = self.count()?.checked_sub(1) else { return Ok(None) };
        (0..len)
            .map(|_| match self.number()? {
                0 => Ok(PathItem::Key(self.text()?.into())),
                1 => Ok(PathItem::Index(self.number()?)),
                other => Err(bad(format!("unknown step {other} of a path"))),
            })
            .collect::<Result<StatePath, _>>()
            .map(Some)
    }

    fn finish(self) -> Result<(), PlanError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(bad(format!("{} bytes too many", self.0.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Region;

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
        plan
    }

    #[test]
    fn save_plans_round_trip() {
        let plan = plan();
        let wire = plan.to_wire();
        let back = SavePlan::from_wire(&wire).unwrap();
        assert_eq!(back.keys, plan.keys);
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
