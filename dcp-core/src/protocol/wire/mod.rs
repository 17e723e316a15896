//! The compact encoding of plans, metadata and values between ranks: versioned, columns of LEB128
//! numbers.
//!
//! Decoding never allocates more memory than the message has bytes to fill it. Save plans and write
//! plans, which repeat themselves, take at most some KiB for each byte.

mod column;
mod load_plan;
mod message;
mod metadata;
mod plan;
mod plan_keys;
mod plan_outline;
mod plan_request;
mod plan_values;
mod rank_set;
mod value;
mod write_plan;
mod write_report;

use std::sync::Arc;

pub use message::{MessageReader, MessageWriter};
pub use plan::PlanParts;
pub use plan_request::{PlanRequest, PlanSummary};

use crate::error::PlanError;
use crate::plans::metadata::{Encoding, FileId, Layout, Placement};
use crate::state::path::{PathItem, StatePath};

fn bad(problem: impl Into<String>) -> PlanError {
    PlanError::message("a message of another rank", problem)
}

fn layout_code(layout: Layout) -> u64 {
    match layout {
        Layout::TorchArchive => 0,
        Layout::Raw => 1,
        Layout::Computed => 2,
        Layout::TorchSave => 3,
    }
}

impl MessageWriter {
    fn encoding(&mut self, encoding: &Encoding) {
        self.number(layout_code(encoding.layout));
        self.number(encoding.transforms.len() as u64);
        encoding.transforms.iter().for_each(|transform| self.text(transform));
    }

    fn placement(&mut self, placement: &Placement) {
        self.number(placement.file.index() as u64);
        self.number(placement.encoding.into());
        self.number(placement.byte_offset);
        self.number(placement.byte_len);
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

impl MessageReader<'_> {
    fn small(&mut self) -> Result<u32, PlanError> {
        u32::try_from(self.number()?).map_err(|_| bad("a number of more than 32 bits"))
    }

    fn encoding(&mut self) -> Result<Encoding, PlanError> {
        let layout = match self.number()? {
            0 => Layout::TorchArchive,
            1 => Layout::Raw,
            2 => Layout::Computed,
            3 => Layout::TorchSave,
            other => return Err(bad(format!("unknown layout {other}"))),
        };
        let transforms = (0..self.count()?)
            .map(|_| self.text().map(Arc::from))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Encoding::new(layout).with_transforms(transforms))
    }

    /// Reads a placement in one of `files` files and `encodings` encodings.
    fn placement(&mut self, files: usize, encodings: usize) -> Result<Placement, PlanError> {
        let (file, encoding, byte_offset) = self.place(files, encodings)?;
        Ok(Placement { file, encoding, byte_offset, byte_len: self.number()? })
    }

    /// Reads file, encoding and offset.
    fn place(&mut self, files: usize, encodings: usize) -> Result<(FileId, u16, u64), PlanError> {
        let file = usize::try_from(self.number()?)
            .ok()
            .filter(|index| *index < files)
            .and_then(FileId::from_index)
            .ok_or_else(|| bad("file out of range"))?;
        let encoding = u16::try_from(self.number()?)
            .ok()
            .filter(|index| usize::from(*index) < encodings)
            .ok_or_else(|| bad("encoding out of range"))?;
        Ok((file, encoding, self.number()?))
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
}
