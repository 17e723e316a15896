//! The archives of `.distcp` files in a build without the feature `torch-dcp`: an error.

use std::convert::Infallible;
use std::ops::Range;

use bytes::Bytes;
use dcp_core::{CheckpointError, FormatError, TensorView, Value};

use super::blobs::Blob;
use super::direct::SharedParts;
use super::pieces::{Pieces, ScatterError};
use super::{Context, ExpectedCrc};

/// The CRC-32s that a save noted: none.
pub(super) struct SavedCrcs;

/// The state of a load of archives: checksums of the save, archives that are located.
#[derive(Default)]
pub(crate) struct Archives {}

impl Context {
    pub(super) async fn saved(&self) -> Result<SavedCrcs, CheckpointError> {
        Ok(SavedCrcs)
    }
}

/// The elements of a tensor in an archive.
pub(super) struct Located {
    pub(super) elements: Range<u64>,
    pub(super) crc: Option<ExpectedCrc>,
    pub(super) earlier: Option<SharedParts>,
}

pub(super) async fn locate(
    _: &Context,
    blob: &Blob,
    _: u64,
) -> Result<Option<Located>, CheckpointError> {
    Err(blob.locate(unread()))
}

pub(super) fn object(_: &SavedCrcs, _: &Blob, _: &Bytes) -> Result<Value, FormatError> {
    Err(unread())
}

/// The elements of a chunk, of which there are none.
pub(super) struct Elements(Infallible);

impl Elements {
    pub(super) fn copy(&self, _: &TensorView, _: Pieces) -> Result<(), ScatterError> {
        match self.0 {}
    }
}

pub(super) fn elements(
    _: &Context,
    _: &SavedCrcs,
    _: &Blob,
    _: &[u8],
    _: u64,
) -> Result<Elements, FormatError> {
    Err(unread())
}

fn unread() -> FormatError {
    let problem = "an archive of PyTorch, which this build cannot read (feature `torch-dcp`)";
    FormatError::new("stored bytes", problem)
}
