//! Clauses of [`CheckpointFormat`](dcp_core::format::CheckpointFormat).

use std::sync::Arc;

use dcp_core::format::{Evidence, FormatRegistry, Listing, OpenOptions};
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt as _};
use dcp_core::{CheckpointError, Key, Storage};

use super::subject::{Subject, files, storage_of};
use crate::case::{Failure, Outcome, ensure};
use crate::{CountingStorage, MemoryStorage};

super::clauses! {
    an_empty_folder_is_not_recognized if Folder,
    a_checkpoint_is_recognized_by_its_names if Folder,
    a_checkpoint_file_is_recognized_by_its_first_bytes if File,
    landmarks_are_among_the_files if Folder,
    opening_costs_one_listing_and_few_reads if Folder,
    files_of_other_programs_change_nothing if Folder,
    the_index_is_owned if Folder,
    a_whole_checkpoint_has_no_problem,
    a_missing_file_is_noticed_before_data_is_read,
    a_truncated_file_is_noticed_before_data_is_read,
}

/// Reads that open a checkpoint of few files.
const READS_MAX: u64 = 3;
/// Files that trainers and people leave in any folder, and their lengths.
const FOREIGN: [(&str, usize); 6] = [
    ("README.md", 0),
    ("trainer_log.jsonl", 100_000),
    ("events.out.tfevents.1.host", 7),
    ("notes/day_1.txt", 12),
    (".DS_Store", 6148),
    ("~backup", 1),
];

/// A storage with files of other programs.
pub(super) async fn foreign_files() -> Result<Arc<dyn Storage>, Failure> {
    let storage = MemoryStorage::new();
    for (name, len) in FOREIGN {
        storage.put(&Key::new(name)?, vec![b'x'; len].into(), PutMode::Create).await?;
    }
    Ok(Arc::new(storage))
}

async fn an_empty_folder_is_not_recognized(subject: Subject) -> Outcome {
    let mut listing = Listing::default();
    for foreign in [false, true] {
        if foreign {
            let meta = |(name, len)| Ok::<_, Failure>(ObjectMeta::new(Key::new(name)?, len as u64));
            listing = Listing::new(FOREIGN.into_iter().map(meta).collect::<Result<Vec<_>, _>>()?);
        }
        let found = subject.format().recognize(&listing.root());
        let found = found.filter(|found| foreign.then_some(found.is_checkpoint()) != Some(false));
        ensure!(found.is_none(), "{found:?} was found in {:?}", listing.objects());
    }
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    match subject.open(&storage).await {
        Err(CheckpointError::NotACheckpoint { .. }) => Ok(()),
        other => Err(Failure::new(format!("opening an empty folder gave {other:?}"))),
    }
}

async fn a_checkpoint_is_recognized_by_its_names(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let listing = Listing::read(&*storage, &[]).await?;
    let Some(found) = subject.format().recognize(&listing.root()) else {
        return Err(Failure::new("the checkpoint is not recognized"));
    };
    ensure!(
        matches!(found.evidence, Evidence::Index | Evidence::Files) && found.problem.is_none(),
        "the checkpoint is recognized as {found:?}"
    );
    // In the listing of a run, the folder has another path.
    let below = |meta: &ObjectMeta| {
        let key = Key::new(format!("runs/step_10/{}", meta.key))?;
        Ok::<_, Failure>(ObjectMeta::new(key, meta.byte_len))
    };
    let run = listing.objects().iter().map(below).collect::<Result<Vec<_>, _>>()?;
    let run = Listing::new(run);
    let inside = run.root().folder("runs/step_10").and_then(|at| subject.format().recognize(&at));
    ensure!(
        inside.as_ref() == Some(&found),
        "in a folder of a run, {found:?} is recognized as {inside:?}"
    );
    subject.holds(&(storage as _), &sample).await
}

async fn a_checkpoint_file_is_recognized_by_its_first_bytes(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let Some(file) = subject.file() else { return Ok(()) };
    let len = storage.stat(file).await?.byte_len.min(64);
    let head = storage.read_range(file, 0..len).await?;
    let format = subject.format();
    ensure!(format.recognize_file(file.file_name(), &head), "the file is not recognized");
    for head in [&b""[..], b"a line of text\n"] {
        ensure!(!format.recognize_file("notes.txt", head), "{head:?} is recognized");
    }
    subject.holds(&(storage as _), &sample).await
}

async fn landmarks_are_among_the_files(subject: Subject) -> Outcome {
    let landmarks = subject.format().info().landmarks;
    let (storage, _) = subject.checkpoint().await?;
    let files = files(&*storage).await?;
    let is_there = |name: &&str| Key::new(name).is_ok_and(|key| files.contains_key(&key));
    ensure!(
        landmarks.is_empty() || landmarks.iter().any(is_there),
        "none of {landmarks:?} is among {:?}",
        files.keys()
    );
    Ok(())
}

async fn opening_costs_one_listing_and_few_reads(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let files = files(&*storage).await?.len() as u64;
    let counting = CountingStorage::new(storage);
    let storage: Arc<dyn Storage> = Arc::new(counting.clone());
    let opened = subject.open(&storage).await?;
    opened.reader.metadata().await?;
    let counts = counting.counts();
    let (lists, reads) = (counts.lists + counts.folder_lists, counts.reads + counts.whole_reads);
    ensure!(
        (lists, counts.stats) == (1, 0),
        "opening needed {lists} listings and the lengths of {} files",
        counts.stats
    );
    ensure!(reads <= files.max(READS_MAX), "opening took {reads} reads of {files} files");
    ensure!(counts.operations() == reads + 1, "opening changed the storage: {counts:?}");
    subject.holds(&storage, &sample).await
}

async fn files_of_other_programs_change_nothing(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let plain = Listing::read(&*storage, &[]).await?;
    let alone = subject.format().recognize(&plain.root());
    for (name, len) in FOREIGN {
        storage.put(&Key::new(name)?, vec![b'x'; len].into(), PutMode::Create).await?;
    }
    let storage: Arc<dyn Storage> = storage;
    let listing = Listing::read(&*storage, &[]).await?;
    let among = subject.format().recognize(&listing.root());
    let evidence = |found: &Option<dcp_core::format::Recognized>| {
        found.as_ref().map(|found| (found.evidence, found.problem.clone()))
    };
    ensure!(
        evidence(&alone) == evidence(&among),
        "{alone:?} becomes {among:?} with files of other programs"
    );
    let complaint = subject.complaint(&storage).await?;
    ensure!(complaint.is_none(), "with files of other programs: {complaint:?}");
    subject.holds(&storage, &sample).await
}

/// A job that writes into the folder of a checkpoint keeps off what belongs to it.
async fn the_index_is_owned(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let listing = Listing::read(&*storage, &[]).await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    for file in whole.keys().filter(|file| !metadata.files().contains(file)) {
        let mut rest = whole.clone();
        rest.remove(file);
        let without = storage_of(&rest).await?;
        let is_needed = subject.holds(&without, &sample).await.is_err();
        let name = file.as_str().split('/').next().unwrap_or_default();
        ensure!(
            !is_needed || subject.format().owns(&listing.root(), name),
            "without {file} the checkpoint is not read, but {name} is not owned"
        );
    }
    for (foreign, _) in FOREIGN {
        ensure!(!subject.format().owns(&listing.root(), foreign), "{foreign} is owned");
    }
    Ok(())
}

async fn a_whole_checkpoint_has_no_problem(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let storage: Arc<dyn Storage> = storage;
    let complaint = subject.complaint(&storage).await?;
    ensure!(complaint.is_none(), "a whole checkpoint has a problem: {complaint:?}");
    let place = subject.place(&storage).await?;
    let registry = FormatRegistry::empty();
    let unknown = registry.open_place(&place, &OpenOptions::default()).await;
    ensure!(unknown.is_err(), "a registry without formats opens it");
    subject.holds(&storage, &sample).await
}

async fn a_missing_file_is_noticed_before_data_is_read(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    for file in whole.keys() {
        let mut rest = whole.clone();
        rest.remove(file);
        let storage = storage_of(&rest).await?;
        // Of one file, there is no folder that it could be missing from.
        let complaint = match subject.file() {
            Some(one) if one == file => subject.open(&storage).await.err().map(|e| e.to_string()),
            _ => subject.complaint(&storage).await?,
        };
        if complaint.is_none() {
            let read = subject.holds(&storage, &sample).await;
            ensure!(read.is_ok(), "without {file} the checkpoint is called whole, but {read:?}");
        }
    }
    Ok(())
}

async fn a_truncated_file_is_noticed_before_data_is_read(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    for (file, bytes) in whole.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        for len in [0, bytes.len() / 2, bytes.len() - 1] {
            let mut damaged = whole.clone();
            damaged.insert(file.clone(), bytes.slice(..len));
            let storage = storage_of(&damaged).await?;
            if subject.complaint(&storage).await?.is_none() {
                let read = subject.holds(&storage, &sample).await;
                ensure!(
                    read.is_ok(),
                    "with {len} of {} bytes of {file} the checkpoint is called whole, but {read:?}",
                    bytes.len()
                );
            }
        }
    }
    Ok(())
}
