//! The compact form in which plans, metadata and values travel between ranks: versioned, columns
//! of LEB128 numbers.
//!
//! Decoding claims no more memory than the message has bytes to fill it with.

mod load_plan;
mod metadata;
mod plan;
mod value;

use std::sync::Arc;

use crate::dims::Dims;
use crate::dtype::DType;
use crate::error::PlanError;
use crate::metadata::{Encoding, FileId, Layout, PathItem, Placement, StatePath};

fn bad(problem: impl Into<String>) -> PlanError {
    PlanError::Wire { problem: problem.into() }
}

/// FNV-1a: stable, dependency-free, and fed by ranks that trust each other only.
fn fingerprint(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
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

/// A message in the making.
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

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn dims(&mut self, dims: &[u64]) {
        self.number(dims.len() as u64);
        dims.iter().for_each(|n| self.number(*n));
    }

    fn option<T>(&mut self, value: Option<T>, send: impl FnOnce(&mut Self, T)) {
        self.number(value.is_some().into());
        if let Some(value) = value {
            send(self, value);
        }
    }

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

/// What is left of a message.
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

    fn bytes(&mut self) -> Result<&'a [u8], PlanError> {
        let len = self.count()?;
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(bytes)
    }

    fn text(&mut self) -> Result<&'a str, PlanError> {
        std::str::from_utf8(self.bytes()?).map_err(|_| bad("text that is not UTF-8"))
    }

    fn dims(&mut self) -> Result<Dims, PlanError> {
        (0..self.count()?).map(|_| self.number()).collect()
    }

    fn numbers(&mut self, count: usize) -> Result<Dims, PlanError> {
        (0..count).map(|_| self.number()).collect()
    }

    fn option<T>(
        &mut self,
        receive: impl FnOnce(&mut Self) -> Result<T, PlanError>,
    ) -> Result<Option<T>, PlanError> {
        match self.number()? {
            0 => Ok(None),
            1 => receive(self).map(Some),
            other => Err(bad(format!("neither something nor nothing but {other}"))),
        }
    }

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

    /// A place in one of so many files, in one of so many encodings.
    fn placement(&mut self, files: usize, encodings: usize) -> Result<Placement, PlanError> {
        let file = usize::try_from(self.number()?)
            .ok()
            .filter(|index| *index < files)
            .and_then(FileId::from_index)
            .ok_or_else(|| bad("file out of range"))?;
        let encoding = u16::try_from(self.number()?)
            .ok()
            .filter(|index| usize::from(*index) < encodings)
            .ok_or_else(|| bad("encoding out of range"))?;
        let (byte_offset, byte_len) = (self.number()?, self.number()?);
        Ok(Placement { file, encoding, byte_offset, byte_len })
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
