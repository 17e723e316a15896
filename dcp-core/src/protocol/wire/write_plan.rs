//! Encodes write plans: items that follow each other, with lengths that repeat, take few bytes.

use std::collections::HashMap;

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::names::key::Key;
use crate::plans::metadata::{FileId, Placement};
use crate::plans::plan::{WriteOrder, WritePlan};

const WRITE_PLAN: &[u8; 4] = b"dwp3";

impl WritePlan {
    /// Encodes the plan as a message: columns of the steps from item to item and of lengths, and the
    /// places of items that do not follow the one before them in the file.
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
        let (mut steps, mut lens) = (Vec::new(), Vec::new());
        let mut known: HashMap<u64, u64> = HashMap::new();
        let mut distinct = Vec::new();
        let mut jumps = Vec::new();
        let mut last: Option<WriteOrder> = None;
        for (at, order) in self.orders.iter().enumerate() {
            let WriteOrder { item, placement } = *order;
            let expected = last.map_or(0, |last| last.item.wrapping_add(1));
            steps.push(u64::from(item.wrapping_sub(expected)));
            let byte_len = placement.byte_len;
            let number = match last {
                Some(last) if last.placement.byte_len == byte_len => lens.last().copied(),
                _ => None,
            };
            lens.push(number.unwrap_or_else(|| {
                *known.entry(byte_len).or_insert_with(|| {
                    distinct.push(byte_len);
                    distinct.len() as u64 - 1
                })
            }));
            if last.and_then(|last| following(&last.placement)) != Some(start_of(&placement)) {
                jumps.push((at, placement));
            }
            last = Some(*order);
        }
        out.column(&steps);
        out.dims(&distinct);
        out.column(&lens);
        out.number(jumps.len() as u64);
        let mut next = 0;
        for (at, placement) in jumps {
            out.number((at - next) as u64);
            out.number(placement.file.index() as u64);
            out.number(placement.encoding.into());
            out.number(placement.byte_offset);
            next = at + 1;
        }
        out.finish()
    }

    /// Decodes a message. Takes at most some KiB of memory for each of its bytes.
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
        let count = usize::try_from(input.number()?).map_err(|_| bad("too many items"))?;
        let steps = input.column(count)?;
        let distinct = input.dims()?;
        let lens = input.column(count)?;
        let mut jumps = Vec::new();
        let mut next = 0_usize;
        for _ in 0..input.count()? {
            let after = usize::try_from(input.number()?).ok();
            let at = after.and_then(|after| next.checked_add(after)).filter(|at| *at < count);
            let at = at.ok_or_else(|| bad("the place of an item that there is not"))?;
            jumps.push((at, input.place(plan.files.len(), plan.encodings.len())?));
            next = at + 1;
        }
        input.finish()?;
        let mut jumps = jumps.into_iter().peekable();
        let mut item = u32::MAX;
        plan.orders.reserve_exact(count);
        for (at, (step, len)) in steps.into_iter().zip(lens).enumerate() {
            let step = u32::try_from(step).map_err(|_| bad("item out of range"))?;
            item = item.wrapping_add(1).wrapping_add(step);
            let len = usize::try_from(len).ok().and_then(|len| distinct.get(len));
            let byte_len = *len.ok_or_else(|| bad("it refers to a length that was not sent"))?;
            let place = match jumps.next_if(|(jump, _)| *jump == at) {
                Some((_, place)) => Some(place),
                None => plan.orders.last().and_then(|last| following(&last.placement)),
            };
            let (file, encoding, byte_offset) =
                place.ok_or_else(|| bad("an item that follows none"))?;
            let placement = Placement { file, encoding, byte_offset, byte_len };
            plan.orders.push(WriteOrder { item, placement });
        }
        Ok(plan)
    }
}

/// File, encoding and offset.
type Start = (FileId, u16, u64);

fn start_of(placement: &Placement) -> Start {
    (placement.file, placement.encoding, placement.byte_offset)
}

/// The offset at which the next item of the file begins.
fn following(placement: &Placement) -> Option<Start> {
    let Placement { file, encoding, byte_offset, byte_len } = *placement;
    Some((file, encoding, byte_offset.checked_add(byte_len)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::metadata::Encoding;

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

    /// Layers of some tensors, in the files of two threads.
    #[test]
    fn the_places_of_1000_items_take_tens_of_bytes() {
        let lens = [8_u64 << 20, 2 << 20, 2 << 20, 8 << 20, 28 << 20, 28 << 20, 28 << 20, 9, 9];
        let mut plan = WritePlan {
            files: vec![
                Key::new("__16383_0.distcp").unwrap(),
                Key::new("__16383_1.distcp").unwrap(),
            ],
            encodings: vec![Encoding::default()],
            ..WritePlan::default()
        };
        let mut ends = [0, 0];
        for item in 0..1000_u32 {
            let at = usize::from(item >= 500);
            let byte_len = lens[item as usize % lens.len()] + 1577;
            let file = FileId::from_index(at).unwrap();
            let placement = Placement { file, encoding: 0, byte_offset: ends[at], byte_len };
            plan.orders.push(WriteOrder { item, placement });
            ends[at] += byte_len;
        }
        let wire = plan.to_wire();
        assert_eq!(WritePlan::from_wire(&wire), Ok(plan));
        assert!(wire.len() <= 128, "{} bytes", wire.len());
    }
}
