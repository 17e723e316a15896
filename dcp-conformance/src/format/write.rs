//! Clauses of [`StorageWriter`](dcp_core::StorageWriter).

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::storage::PutMode;
use dcp_core::{Key, Storage, StorageErrorKind};

use super::sample::Sample;
use super::subject::{Files, Subject, Written, files, same_files, save, save_from, storage_of};
use crate::case::{Failure, Outcome, ensure};
use crate::{Fault, FaultStorage, MemoryStorage};

super::clauses! {
    the_same_state_makes_the_same_bytes if Writer,
    nothing_is_visible_before_the_commit if Writer,
    the_old_checkpoint_stays_until_the_commit if Writer,
    a_replaced_checkpoint_leaves_no_files if Writer,
    abandoning_removes_what_was_written_and_nothing_else if Writer,
    a_failing_source_fails_the_write if Writer,
    a_commit_of_files_that_are_not_whole_fails if Writer,
    replacing_needs_permission if Writer,
    names_of_a_generation_are_new if Writer,
    a_stopped_save_is_never_called_whole if Writer,
    a_stopped_overwrite_leaves_one_whole_checkpoint if Writer,
    a_save_that_fails_removes_what_it_wrote if Writer,
    a_save_on_a_full_storage_keeps_the_old_checkpoint if Writer,
    a_commit_that_took_effect_is_kept if Writer,
    of_overlapping_savers_one_wins if Writer,
}

fn empty() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new())
}

/// Saves into `storage`.
async fn put(
    subject: &Subject,
    storage: &Arc<dyn Storage>,
    sample: &Sample,
    overwrite: bool,
) -> Outcome {
    save(&*subject.writer(Arc::clone(storage), overwrite)?, sample).await
}

async fn the_same_state_makes_the_same_bytes(subject: Subject) -> Outcome {
    let (first, second) = (empty(), empty());
    for storage in [&first, &second] {
        put(&subject, storage, &subject.sample(1), false).await?;
    }
    let (first, second) = (files(&*first).await?, files(&*second).await?);
    ensure!(!first.is_empty(), "a save wrote nothing");
    same_files(&first, &second, "in a second save of the same state")
}

async fn nothing_is_visible_before_the_commit(subject: Subject) -> Outcome {
    let storage = empty();
    let writer = subject.writer(Arc::clone(&storage), false)?;
    let sample = subject.sample(1);
    let written = Written::write(&*writer, &sample, None).await?;
    ensure!(
        subject.complaint(&storage).await?.is_some(),
        "before the commit, the folder is called a whole checkpoint"
    );
    written.commit().await?;
    subject.holds(&storage, &sample).await
}

async fn the_old_checkpoint_stays_until_the_commit(subject: Subject) -> Outcome {
    let (storage, old, new) = (empty(), subject.sample(1), subject.sample(2));
    put(&subject, &storage, &old, false).await?;
    let before = files(&*storage).await?;
    let writer = subject.writer(Arc::clone(&storage), true)?;
    let written = Written::write(&*writer, &new, None).await?;
    for (key, bytes) in &files(&*storage).await? {
        let same = before.get(key).is_none_or(|before| before == bytes);
        ensure!(same, "{key} of the old checkpoint has other bytes before the commit");
    }
    let complaint = subject.complaint(&storage).await?;
    ensure!(complaint.is_none(), "before the commit, the old checkpoint: {complaint:?}");
    subject.holds(&storage, &old).await?;
    written.commit().await?;
    subject.holds(&storage, &new).await
}

async fn a_replaced_checkpoint_leaves_no_files(subject: Subject) -> Outcome {
    let storage = empty();
    let foreign = Key::new("notes.txt")?;
    storage.put(&foreign, "of a user".into(), PutMode::Create).await?;
    put(&subject, &storage, &subject.sample(1), false).await?;
    let first = files(&*storage).await?;
    for seed in 2..5 {
        let sample = subject.sample(seed);
        put(&subject, &storage, &sample, true).await?;
        subject.holds(&storage, &sample).await?;
        let now = files(&*storage).await?;
        ensure!(now.get(&foreign) == first.get(&foreign), "a file of a user was changed");
        ensure!(
            now.len() == first.len(),
            "after save {seed} there are {} files, after the first {}: {:?}",
            now.len(),
            first.len(),
            now.keys()
        );
    }
    Ok(())
}

async fn abandoning_removes_what_was_written_and_nothing_else(subject: Subject) -> Outcome {
    for replaced in [false, true] {
        let storage = empty();
        storage.put(&Key::new("notes.txt")?, "of a user".into(), PutMode::Create).await?;
        if replaced {
            put(&subject, &storage, &subject.sample(1), false).await?;
        }
        let before = files(&*storage).await?;
        let writer = subject.writer(Arc::clone(&storage), true)?;
        let written = Written::write(&*writer, &subject.sample(2), None).await?;
        written.abandon().await;
        same_files(&before, &files(&*storage).await?, "after a save was abandoned")?;
        // The place is free again.
        save(&*writer, &subject.sample(2)).await?;
        subject.holds(&storage, &subject.sample(2)).await?;
    }
    Ok(())
}

async fn a_failing_source_fails_the_write(subject: Subject) -> Outcome {
    let sample = subject.sample(2);
    for broken in [(0, 0), (1, 1)] {
        let storage = empty();
        put(&subject, &storage, &subject.sample(1), false).await?;
        let before = files(&*storage).await?;
        let writer = subject.writer(Arc::clone(&storage), true)?;
        let saved = save_from(&*writer, &sample, Some(broken)).await;
        ensure!(saved.is_err(), "a save without the data of item {broken:?} reports success");
        same_files(&before, &files(&*storage).await?, "after data could not be had")?;
    }
    Ok(())
}

/// The files of another rank are not there, or not whole, as after a rank with a storage of its own.
async fn a_commit_of_files_that_are_not_whole_fails(subject: Subject) -> Outcome {
    let (before, old) = old(&subject).await?;
    for cut in [false, true] {
        let mut at = 0;
        loop {
            let storage = storage_of(&before).await?;
            let writers = [
                subject.writer(Arc::clone(&storage), true)?,
                subject.writer(Arc::clone(&storage), true)?,
            ];
            let both = [&*writers[0], &*writers[1]];
            let written = Written::write_by(both, &subject.sample(2), None).await?;
            let Some(file) = written.files_of_second().get(at).cloned() else { break };
            let bytes = storage.read_whole(&file, u64::MAX).await?.bytes;
            storage.delete(std::slice::from_ref(&file)).await?;
            if cut {
                let half = bytes.slice(..bytes.len() / 2);
                storage.put(&file, half.into(), PutMode::Create).await?;
            }
            let what = if cut { "is cut" } else { "is gone" };
            ensure!(
                written.commit().await.is_err(),
                "a commit reports success, and {file} of the other rank {what}"
            );
            subject.holds(&storage, &old).await?;
            at += 1;
        }
    }
    Ok(())
}

async fn replacing_needs_permission(subject: Subject) -> Outcome {
    let storage = empty();
    put(&subject, &storage, &subject.sample(1), false).await?;
    let before = files(&*storage).await?;
    let writer = subject.writer(Arc::clone(&storage), false)?;
    match writer.begin().await {
        Err(dcp_core::CheckpointError::Storage(error))
            if error.kind() == StorageErrorKind::AlreadyExists => {}
        other => {
            let message = format!("to begin a save over a checkpoint gave {other:?}");
            return Err(Failure::new(message));
        }
    }
    same_files(&before, &files(&*storage).await?, "after a refused save")
}

async fn names_of_a_generation_are_new(subject: Subject) -> Outcome {
    let storage = empty();
    let mut earlier: BTreeSet<Key> = BTreeSet::new();
    let mut first: Option<Vec<Key>> = None;
    for seed in 1..4 {
        let writer = subject.writer(Arc::clone(&storage), true)?;
        let written = Written::write(&*writer, &subject.sample(seed), None).await?;
        let generation = written.generation;
        for file in &written.files {
            ensure!(earlier.insert(file.clone()), "{file} had its name in an earlier save");
        }
        let first = first.get_or_insert_with(|| written.files.clone());
        let renamed: Result<Vec<_>, _> =
            first.iter().map(|file| writer.renamed(file, generation)).collect();
        let renamed = renamed?;
        ensure!(
            renamed == written.files,
            "the files of generation {generation} are {:?}, and `renamed` says {renamed:?}",
            written.files
        );
        written.commit().await?;
    }
    let writer = subject.writer(storage, true)?;
    let foreign = writer.renamed(&Key::new("of_another/program.txt")?, 1);
    ensure!(foreign.is_err(), "a name of another program was renamed to {foreign:?}");
    Ok(())
}

/// A save over the checkpoint in `before`, if there is one, on a storage that `fault` breaks.
async fn broken_save(
    subject: &Subject,
    before: &Files,
    new: &Sample,
    fault: impl FnOnce(FaultStorage) -> FaultStorage,
) -> Result<(Arc<dyn Storage>, Outcome, u64), Failure> {
    let storage = storage_of(before).await?;
    let faulty = fault(FaultStorage::new(Arc::clone(&storage)));
    let saved = match subject.writer(Arc::new(faulty.clone()), true) {
        Ok(writer) => save(&*writer, new).await,
        Err(failure) => return Err(failure),
    };
    Ok((storage, saved, faulty.operations()))
}

async fn a_stopped_save_is_never_called_whole(subject: Subject) -> Outcome {
    let (nothing, new) = (Files::new(), subject.sample(2));
    let (_, saved, operations) = broken_save(&subject, &nothing, &new, |sound| sound).await?;
    saved?;
    for last in 0..operations {
        let (storage, _, _) =
            broken_save(&subject, &nothing, &new, |sound| sound.dying_after(last)).await?;
        if subject.complaint(&storage).await?.is_none() {
            let holds = subject.holds(&storage, &new).await;
            ensure!(
                holds.is_ok(),
                "a save that stopped after {last} operations is called whole, but {holds:?}"
            );
        }
        // What it left is in the way of no other save.
        put(&subject, &storage, &new, true).await?;
        subject.holds(&storage, &new).await?;
    }
    Ok(())
}

/// The files of a checkpoint, and what it holds.
async fn old(subject: &Subject) -> Result<(Files, Sample), Failure> {
    let (storage, sample) = subject.checkpoint().await?;
    Ok((files(&*storage).await?, sample))
}

async fn a_stopped_overwrite_leaves_one_whole_checkpoint(subject: Subject) -> Outcome {
    let (before, old) = old(&subject).await?;
    let new = subject.sample(2);
    let (_, saved, operations) = broken_save(&subject, &before, &new, |sound| sound).await?;
    saved?;
    for last in 0..operations {
        for fault in [None, Some(Fault::Tear)] {
            let (storage, _, _) = broken_save(&subject, &before, &new, |sound| match fault {
                Some(fault) => sound.fault(last + 1, fault),
                None => sound.dying_after(last),
            })
            .await?;
            if let Err(failure) = subject.holds_one(&storage, &[&old, &new]).await {
                let message = failure.message();
                let when = format!("an overwrite stopped after {last} operations");
                return Err(Failure::new(format!("{when}, and of the checkpoint: {message}")));
            }
        }
    }
    Ok(())
}

async fn a_save_that_fails_removes_what_it_wrote(subject: Subject) -> Outcome {
    let (before, old) = old(&subject).await?;
    let new = subject.sample(2);
    for before in [Files::new(), before] {
        let (_, saved, operations) = broken_save(&subject, &before, &new, |sound| sound).await?;
        saved?;
        for operation in 1..=operations {
            let fault = Fault::Fail(StorageErrorKind::Denied);
            let (storage, saved, _) =
                broken_save(&subject, &before, &new, |sound| sound.fault(operation, fault)).await?;
            let when = format!("after a save failed at its operation {operation}");
            if saved.is_ok() {
                subject.holds(&storage, &new).await?;
            } else if subject.holds(&storage, &new).await.is_err() {
                same_files(&before, &files(&*storage).await?, &when)?;
                if !before.is_empty() {
                    subject.holds(&storage, &old).await?;
                }
            }
        }
    }
    Ok(())
}

async fn a_save_on_a_full_storage_keeps_the_old_checkpoint(subject: Subject) -> Outcome {
    let (before, old) = old(&subject).await?;
    let new = subject.sample(2);
    let (_, saved, operations) = broken_save(&subject, &before, &new, |sound| sound).await?;
    saved?;
    for last in 0..operations {
        let (storage, saved, _) =
            broken_save(&subject, &before, &new, |sound| sound.full_after(last)).await?;
        let found = subject.holds_one(&storage, &[&old, &new]).await?;
        ensure!(
            found == 1 || saved.is_err(),
            "the storage was full after {last} operations, and the save reports success"
        );
    }
    Ok(())
}

async fn a_commit_that_took_effect_is_kept(subject: Subject) -> Outcome {
    let (before, old) = old(&subject).await?;
    let new = subject.sample(2);
    for before in [Files::new(), before] {
        let (_, saved, operations) = broken_save(&subject, &before, &new, |sound| sound).await?;
        saved?;
        for operation in 1..=operations {
            for fault in [Fault::FailAfterwards, Fault::LoseReply] {
                let (storage, saved, _) =
                    broken_save(&subject, &before, &new, |sound| sound.fault(operation, fault))
                        .await?;
                let when = format!("operation {operation} of a save met {fault:?}");
                let found = if before.is_empty() && subject.complaint(&storage).await?.is_some() {
                    None
                } else {
                    let found = subject.holds_one(&storage, &[&new, &old]).await;
                    Some(found.map_err(|failure| {
                        Failure::new(format!("{when}: {}", failure.message()))
                    })?)
                };
                ensure!(
                    saved.is_err() || found == Some(0),
                    "{when}, the save reports success, and its checkpoint is not there"
                );
            }
        }
    }
    Ok(())
}

async fn of_overlapping_savers_one_wins(subject: Subject) -> Outcome {
    let storages = [MemoryStorage::new(), MemoryStorage::new().conditional_claims()];
    for storage in storages {
        let storage: Arc<dyn Storage> = Arc::new(storage);
        put(&subject, &storage, &subject.sample(1), false).await?;
        let samples = [subject.sample(2), subject.sample(3)];
        let writers = [
            subject.writer(Arc::clone(&storage), true)?,
            subject.writer(Arc::clone(&storage), true)?,
        ];
        let first = Written::write(&*writers[0], &samples[0], None).await?;
        let second = Written::write(&*writers[1], &samples[1], None).await;
        let first = first.commit().await;
        let second = match second {
            Ok(second) => second.commit().await,
            Err(failure) => Err(failure),
        };
        let winners = usize::from(first.is_ok()) + usize::from(second.is_ok());
        ensure!(winners == 1, "of two savers, the outcomes are {first:?} and {second:?}");
        let winner = &samples[usize::from(second.is_ok())];
        subject.holds(&storage, winner).await?;
    }
    Ok(())
}
