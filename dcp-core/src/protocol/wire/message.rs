//! Messages between ranks: a magic number, LEB128 numbers, and values built from them.

use bytes::Bytes;

use super::bad;
use crate::error::PlanError;
use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;

/// Writes a message to other ranks, readable by this version of the crate only.
///
/// Small numbers take one byte. A [`MessageReader`] reads the values in the order of writing.
///
/// ```
/// use dcp_core::DType;
/// use dcp_core::wire::{MessageReader, MessageWriter};
///
/// let mut message = MessageWriter::new(*b"hey1");
/// message.text("weight");
/// message.dtype(DType::Float32);
/// message.dims(&[4, 300]);
/// let bytes = message.finish();
///
/// let mut message = MessageReader::new(&bytes, *b"hey1")?;
/// assert_eq!(message.text()?, "weight");
/// assert_eq!(message.dtype()?, DType::Float32);
/// assert_eq!(*message.dims()?, [4, 300]);
/// message.finish()?;
/// # Ok::<(), dcp_core::PlanError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "call `finish`"]
pub struct MessageWriter(pub(super) Vec<u8>);

impl MessageWriter {
    /// Begins with `magic`, which identifies the kind and version of a message.
    pub fn new(magic: [u8; 4]) -> Self {
        Self(magic.to_vec())
    }

    /// Writes a number, in as few bytes as it needs (LEB128).
    pub fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push((n & 0x7f) as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    /// Writes a length and bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// Writes text as its bytes.
    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// Writes a count and numbers.
    pub fn dims(&mut self, dims: &[u64]) {
        self.number(dims.len() as u64);
        self.numbers(dims);
    }

    /// Writes numbers whose count the message does not contain.
    pub fn numbers(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|n| self.number(*n));
    }

    /// Writes flags, eight per byte, whose count the message does not contain.
    pub fn flags(&mut self, flags: &[bool]) {
        let byte =
            |bits: &[bool]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
        self.0.extend(flags.chunks(8).map(byte));
    }

    /// Writes a dtype.
    pub fn dtype(&mut self, dtype: DType) {
        let code = DType::ALL.iter().position(|known| *known == dtype);
        self.number(code.unwrap_or(usize::MAX) as u64);
    }

    /// Writes an optional value.
    pub(super) fn option<T>(&mut self, value: Option<T>, send: impl FnOnce(&mut Self, T)) {
        self.number(value.is_some().into());
        if let Some(value) = value {
            send(self, value);
        }
    }

    /// Returns the message.
    #[must_use]
    pub fn finish(self) -> Bytes {
        self.0.into()
    }
}

/// The rest of a message from a [`MessageWriter`].
///
/// Never allocates more memory than the message has bytes to fill it.
#[derive(Clone, Debug)]
pub struct MessageReader<'a>(pub(super) &'a [u8]);

impl<'a> MessageReader<'a> {
    /// Reads the bytes after `magic`.
    ///
    /// # Errors
    ///
    /// When the message begins with another value.
    pub fn new(bytes: &'a [u8], magic: [u8; 4]) -> Result<Self, PlanError> {
        bytes
            .strip_prefix(&magic)
            .map(Self)
            .ok_or_else(|| bad("another kind or version of message"))
    }

    /// The number of remaining bytes.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.0.len()
    }

    /// Reads a number.
    ///
    /// # Errors
    ///
    /// When the message ends, or the number has more than 64 bits.
    pub fn number(&mut self) -> Result<u64, PlanError> {
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

    /// Reads a count of values of at least one byte each, which cannot exceed the remaining bytes.
    ///
    /// # Errors
    ///
    /// When it exceeds them, and as [`number`](Self::number).
    pub fn count(&mut self) -> Result<usize, PlanError> {
        let n = self.number()?;
        usize::try_from(n)
            .ok()
            .filter(|n| *n <= self.0.len())
            .ok_or_else(|| bad(format!("a list of {n} in {} bytes", self.0.len())))
    }

    /// Reads a length and bytes.
    ///
    /// # Errors
    ///
    /// When the message is shorter.
    pub fn bytes(&mut self) -> Result<&'a [u8], PlanError> {
        let len = self.count()?;
        self.take(len)
    }

    /// Reads text.
    ///
    /// # Errors
    ///
    /// When it is not UTF-8, and as [`bytes`](Self::bytes).
    pub fn text(&mut self) -> Result<&'a str, PlanError> {
        std::str::from_utf8(self.bytes()?).map_err(|_| bad("text that is not UTF-8"))
    }

    /// Reads a count and numbers.
    ///
    /// # Errors
    ///
    /// As [`count`](Self::count).
    pub fn dims(&mut self) -> Result<Dims, PlanError> {
        let count = self.count()?;
        self.numbers(count)
    }

    /// Reads `count` numbers.
    ///
    /// # Errors
    ///
    /// When the message is shorter.
    pub fn numbers(&mut self, count: usize) -> Result<Dims, PlanError> {
        (0..count).map(|_| self.number()).collect()
    }

    /// Reads `count` flags.
    ///
    /// # Errors
    ///
    /// When the message is shorter.
    pub fn flags(&mut self, count: usize) -> Result<Vec<bool>, PlanError> {
        let bytes = self.take(count.div_ceil(8))?;
        let flags = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
        Ok(flags.take(count).collect())
    }

    /// Reads a dtype.
    ///
    /// # Errors
    ///
    /// When it is unknown.
    pub fn dtype(&mut self) -> Result<DType, PlanError> {
        let code = self.number()?;
        usize::try_from(code)
            .ok()
            .and_then(|code| DType::ALL.get(code))
            .copied()
            .ok_or_else(|| bad(format!("unknown dtype {code}")))
    }

    /// Reads an optional value.
    pub(super) fn option<T>(
        &mut self,
        receive: impl FnOnce(&mut Self) -> Result<T, PlanError>,
    ) -> Result<Option<T>, PlanError> {
        match self.number()? {
            0 => Ok(None),
            1 => receive(self).map(Some),
            other => Err(bad(format!("neither something nor nothing but {other}"))),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], PlanError> {
        let (array, rest) = self.0.split_first_chunk().ok_or_else(|| bad("it ends too early"))?;
        self.0 = rest;
        Ok(*array)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], PlanError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(|| bad("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// Ends reading.
    ///
    /// # Errors
    ///
    /// When bytes remain.
    pub fn finish(self) -> Result<(), PlanError> {
        match self.0.len() {
            0 => Ok(()),
            rest => Err(bad(format!("{rest} bytes too many"))),
        }
    }
}
