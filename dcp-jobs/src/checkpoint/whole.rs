//! Checkpoints of which all is needed.

use std::ops::Deref;

use dcp_core::format::WantedKeys;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::opener::Need;
use crate::error::Error;
use crate::keys::has_needed;

/// A checkpoint that is whole: the one that was opened, or the same one opened again.
#[derive(Debug)]
pub(crate) enum Whole<'a> {
    Opened(&'a Checkpoint),
    Again(Box<Checkpoint>),
}

impl<'a> Whole<'a> {
    /// The checkpoint itself where it was opened so, else opened again, with its damage as errors.
    pub(crate) async fn of(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        if checkpoint.opener.need == Need::Whole {
            return Self::with_all_keys(checkpoint).await;
        }
        let opener = checkpoint.opener.unheard().need(Need::Whole);
        Ok(Self::Again(Box::new(opener.open(&checkpoint.uri).await?)))
    }

    /// Opens the checkpoint for a job that needs only these keys: the checkpoint itself where it was opened so
    /// and has them.
    pub(crate) async fn of_keys(
        checkpoint: &'a Checkpoint,
        needed: &WantedKeys,
    ) -> Result<Self, Error> {
        let is_enough =
            checkpoint.opener.need == Need::Whole && has_needed(&checkpoint.source, needed).await?;
        if is_enough { Ok(Self::Opened(checkpoint)) } else { Self::of(checkpoint).await }
    }

    /// The checkpoint itself where it was opened for all keys, else opened again.
    pub(crate) async fn with_all_keys(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        if checkpoint.has_all_keys {
            return Ok(Self::Opened(checkpoint));
        }
        let opener = checkpoint.opener.unheard();
        Ok(Self::Again(Box::new(opener.open(&checkpoint.uri).await?)))
    }

    pub(crate) async fn of_all(
        checkpoints: &'a [Checkpoint],
        needed: Option<&WantedKeys>,
    ) -> Result<Vec<Self>, Error> {
        let mut all = Vec::with_capacity(checkpoints.len());
        for checkpoint in checkpoints {
            all.push(match needed {
                Some(needed) => Self::of_keys(checkpoint, needed).await?,
                None => Self::of(checkpoint).await?,
            });
        }
        Ok(all)
    }
}

impl Deref for Whole<'_> {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        match self {
            Self::Opened(checkpoint) => checkpoint,
            Self::Again(checkpoint) => checkpoint,
        }
    }
}
