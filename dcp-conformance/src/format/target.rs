//! Clauses of [`CheckpointTarget`](dcp_core::format::CheckpointTarget), and of the occupants of a
//! folder.

use std::sync::Arc;

use dcp_core::Storage;
use dcp_core::format::{CheckpointTarget, Existing, Occupant, WriterOptions};

use super::recognize::foreign_files;
use super::subject::{Subject, Written, save};
use crate::MemoryStorage;
use crate::case::{Failure, Outcome, ensure};

super::clauses! {
    a_checkpoint_keeps_others_out if Folder,
    a_target_knows_its_own_checkpoints if Target,
    a_target_writes_what_the_format_opens if Target,
}

/// A job that writes another format into the folder of a checkpoint is refused.
async fn a_checkpoint_keeps_others_out(subject: Subject) -> Outcome {
    let empty: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    for storage in [empty, foreign_files().await?] {
        let place = subject.place(&storage).await?;
        let found = subject.format().occupant(&place.listing().root());
        ensure!(found.is_none(), "a folder without a checkpoint is occupied: {found:?}");
    }
    let (storage, _) = subject.checkpoint().await?;
    let place = subject.place(&(storage as _)).await?;
    let found = subject.format().occupant(&place.listing().root());
    ensure!(
        matches!(found, Some(Occupant::Checkpoint(_))),
        "other formats may be written over the checkpoint: {found:?}"
    );
    Ok(())
}

fn target(subject: &Subject) -> Result<&dyn CheckpointTarget, Failure> {
    subject.format().target().ok_or_else(|| Failure::new("the format has no target"))
}

/// Returns the target's answer about a storage, with the index that the format reads there.
async fn existing(subject: &Subject, storage: &Arc<dyn Storage>) -> Result<Existing, Failure> {
    let place = subject.place(storage).await?;
    let metadata = match subject.open(storage).await {
        Ok(opened) => opened.reader.metadata().await.ok(),
        Err(_) => None,
    };
    Ok(target(subject)?.existing(&place.listing().root(), metadata.as_deref()))
}

async fn a_target_knows_its_own_checkpoints(subject: Subject) -> Outcome {
    let name = subject.format().info().name;
    let parts = target(&subject)?.parts();
    ensure!(parts.contains(&name), "{name:?} is not among its own parts, {parts:?}");
    let empty: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    for storage in [empty, foreign_files().await?] {
        let found = existing(&subject, &storage).await?;
        ensure!(found == Existing::Nothing, "{found:?} in a folder without a checkpoint");
    }
    let (storage, _) = subject.checkpoint().await?;
    let found = existing(&subject, &(storage as _)).await?;
    ensure!(found == Existing::Checkpoint, "a checkpoint of the format is {found:?}");

    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = target(&subject)?.writer(Arc::clone(&storage), &WriterOptions::default())?;
    let written = Written::write(&*writer, &subject.sample(1), None).await?;
    let found = existing(&subject, &storage).await?;
    ensure!(
        matches!(found, Existing::Remains | Existing::Nothing),
        "a save that did not finish is {found:?}, which the next save does not replace"
    );
    written.abandon().await;
    Ok(())
}

async fn a_target_writes_what_the_format_opens(subject: Subject) -> Outcome {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = |overwrite| {
        let options = WriterOptions::default().with_overwrite(overwrite);
        target(&subject)?.writer(Arc::clone(&storage), &options).map_err(Failure::from)
    };
    let (old, new) = (subject.sample(1), subject.sample(2));
    save(&*writer(false)?, &old).await?;
    subject.holds(&storage, &old).await?;
    ensure!(
        save(&*writer(false)?, &new).await.is_err(),
        "a checkpoint is replaced without the option to overwrite"
    );
    subject.holds(&storage, &old).await?;
    save(&*writer(true)?, &new).await?;
    subject.holds(&storage, &new).await
}
