//! Clauses of [`StorageReader`](dcp_core::StorageReader).

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::metadata::{Entry, Placement};
use dcp_core::{Region, Storage, StorageErrorKind};

use super::load::{Broken, Load};
use super::sample::Sample;
use super::subject::{Subject, files, storage_of};
use crate::case::{Failure, Outcome, ensure};
use crate::numbers::Numbers;
use crate::{Fault, FaultStorage};

super::clauses! {
    the_index_has_what_was_saved,
    any_box_has_the_right_bytes,
    objects_come_back if Objects,
    a_failing_sink_is_an_error,
    a_failing_storage_is_an_error,
    a_truncated_file_gives_no_wrong_data,
    flipped_bits_never_panic,
    flipped_bits_of_data_are_found if Checksums,
    flipped_bits_of_the_index_are_found if IndexChecksum,
}

async fn the_index_has_what_was_saved(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    let stored: BTreeSet<&str> =
        metadata.iter().map(|(fqn, _)| &**fqn).filter(|fqn| !subject.is_own(fqn)).collect();
    let tensors = sample.tensors.iter().map(|tensor| &*tensor.fqn);
    let saved: BTreeSet<&str> =
        tensors.chain(sample.objects.iter().map(|(fqn, _)| &**fqn)).collect();
    ensure!(stored == saved, "the index has {stored:?}, saved was {saved:?}");
    for (fqn, entry) in metadata.iter().filter(|(fqn, _)| !subject.is_own(fqn)) {
        let saved = sample.tensors.iter().find(|tensor| *tensor.fqn == **fqn);
        match (entry, saved) {
            (Entry::Tensor(stored), Some(saved)) => {
                ensure!(
                    stored.dtype == saved.dtype && stored.shape == saved.shape,
                    "{fqn:?} is {} {} in the index, saved was {} {}",
                    stored.dtype.name(),
                    stored.shape,
                    saved.dtype.name(),
                    saved.shape
                );
                let whole = Region::full(stored.shape.clone())?;
                let mut volume = 0;
                for chunk in stored.chunks.iter() {
                    let region = chunk.region()?;
                    ensure!(whole.contains(&region), "chunk {region} of {fqn:?} is outside it");
                    volume += region.volume();
                }
                ensure!(volume == whole.volume(), "the chunks of {fqn:?} do not make it up");
            }
            (Entry::Object(_), None) => {}
            _ => return Err(Failure::new(format!("{fqn:?} is of another kind in the index"))),
        }
    }
    Ok(())
}

async fn any_box_has_the_right_bytes(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    let mut numbers = Numbers(7);
    for round in 0..40 {
        let mut load = Load::default();
        for tensor in &sample.tensors {
            // One box at a time, and boxes of several tensors in one plan.
            if round % 2 == 0 && numbers.below(3) > 0 {
                continue;
            }
            let (mut offsets, mut sizes) = (Vec::new(), Vec::new());
            for len in tensor.shape.iter() {
                let offset = numbers.below(len + 1);
                offsets.push(offset);
                sizes.push(numbers.below(len - offset + 1));
            }
            load.add_box(&metadata, tensor, Region::new(offsets, sizes)?)?;
        }
        load.run(&*opened.reader, &metadata, &sample).await??;
    }
    Ok(())
}

async fn objects_come_back(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    ensure!(!sample.objects.is_empty(), "the checkpoint that was filled in holds no object");
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    for (fqn, _) in &sample.objects {
        let mut load = Load::default();
        load.add_object(&metadata, fqn)?;
        load.run(&*opened.reader, &metadata, &sample).await??;
    }
    Ok(())
}

async fn a_failing_sink_is_an_error(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    for broken in [Broken::Destination, Broken::Commit, Broken::Object] {
        if broken == Broken::Object && sample.objects.is_empty() {
            continue;
        }
        let mut load = Load::whole(&metadata, &sample)?;
        load.broken = Some(broken);
        let read = load.run(&*opened.reader, &metadata, &sample).await?;
        let error = read.err().map(|failure| failure.message().to_owned());
        ensure!(
            error.as_ref().is_some_and(|error| error.contains("it is broken")),
            "when {broken:?} of the sink fails, the read ends with {error:?}"
        );
    }
    Ok(())
}

/// Opens and reads all. The inner error is that of the format; the outer one is a violation of its
/// contract.
async fn read_all(
    subject: &Subject,
    storage: &Arc<dyn Storage>,
    sample: &Sample,
) -> Result<Result<(), Failure>, Failure> {
    let opened = match subject.open(storage).await {
        Ok(opened) => opened,
        Err(error) => return Ok(Err(error.into())),
    };
    let metadata = match opened.reader.metadata().await {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(error.into())),
    };
    Load::whole(&metadata, sample)?.run(&*opened.reader, &metadata, sample).await
}

async fn a_failing_storage_is_an_error(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let sound = FaultStorage::new(Arc::clone(&storage) as _);
    read_all(&subject, &(Arc::new(sound.clone()) as _), &sample).await??;
    let faults = [
        Fault::Fail(StorageErrorKind::Denied),
        Fault::Fail(StorageErrorKind::Transient),
        Fault::ShortRead,
    ];
    for (operation, fault) in (1..=sound.operations()).flat_map(|n| faults.map(|fault| (n, fault)))
    {
        let faulty = FaultStorage::new(Arc::clone(&storage) as _).fault(operation, fault);
        let read = read_all(&subject, &(Arc::new(faulty) as _), &sample).await?;
        ensure!(
            read.is_err(),
            "operation {operation} of a read meets {fault:?}, and the read reports success"
        );
    }
    Ok(())
}

async fn a_truncated_file_gives_no_wrong_data(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let mut numbers = Numbers(11);
    for (file, bytes) in &whole {
        for _ in 0..24 {
            let len = usize::try_from(numbers.below(bytes.len() as u64))?;
            let mut damaged = whole.clone();
            damaged.insert(file.clone(), bytes.slice(..len));
            right_or_refused(&subject, damaged, &sample, &format!("{file} has {len} bytes"))
                .await?;
        }
    }
    Ok(())
}

/// Fails when the checkpoint in `files` can be read and holds something else.
async fn right_or_refused(
    subject: &Subject,
    files: super::subject::Files,
    sample: &Sample,
    when: &str,
) -> Outcome {
    let storage = storage_of(&files).await?;
    match read_all(subject, &storage, sample).await {
        Ok(_) => Ok(()),
        Err(failure) => Err(Failure::new(format!("where {when}, {}", failure.message()))),
    }
}

/// The files with one bit of one of them flipped.
pub(super) fn flipped(
    files: &super::subject::Files,
    file: &dcp_core::Key,
    at: u64,
    bit: u64,
) -> Result<super::subject::Files, Failure> {
    let mut damaged = files.clone();
    if let Some(bytes) = damaged.get_mut(file) {
        let mut changed = bytes.to_vec();
        if let Some(byte) = changed.get_mut(usize::try_from(at)?) {
            *byte ^= 1 << bit;
        }
        *bytes = changed.into();
    }
    Ok(damaged)
}

async fn flipped_bits_never_panic(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let mut numbers = Numbers(13);
    for (file, bytes) in whole.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        for _ in 0..150 {
            let (at, bit) = (numbers.below(bytes.len() as u64), numbers.below(8));
            let storage = storage_of(&flipped(&whole, file, at, bit)?).await?;
            subject.complaint(&storage).await?;
            // Without a checksum of the index, anything may come of it but a panic.
            let _ = read_all(&subject, &storage, &sample).await;
        }
    }
    Ok(())
}

async fn flipped_bits_of_data_are_found(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    let mut numbers = Numbers(17);
    for (fqn, entry) in metadata.iter() {
        let placements: Vec<Placement> = match entry {
            Entry::Tensor(tensor) => {
                tensor.chunks.iter().filter_map(|chunk| chunk.placement).collect()
            }
            Entry::Object(object) => object.placement.into_iter().collect(),
            _ => Vec::new(),
        };
        for placement in placements.into_iter().filter(|placement| placement.byte_len > 0) {
            let Some(file) = metadata.file(placement.file) else { continue };
            for _ in 0..48 {
                let at = placement.byte_offset + numbers.below(placement.byte_len);
                let bit = numbers.below(8);
                let when = format!("bit {bit} of byte {at} of {file}, in {fqn:?}, is flipped");
                let damaged = flipped(&whole, file, at, bit)?;
                right_or_refused(&subject, damaged, &sample, &when).await?;
            }
        }
    }
    Ok(())
}

async fn flipped_bits_of_the_index_are_found(subject: Subject) -> Outcome {
    let (storage, sample) = subject.checkpoint().await?;
    let whole = files(&*storage).await?;
    let opened = subject.open(&(storage as _)).await?;
    let metadata = opened.reader.metadata().await?;
    let index: Vec<_> = whole.iter().filter(|(key, _)| !metadata.files().contains(key)).collect();
    ensure!(!index.is_empty(), "the checkpoint has no file that is its index");
    let mut numbers = Numbers(19);
    for (file, bytes) in index.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
        for _ in 0..150 {
            let (at, bit) = (numbers.below(bytes.len() as u64), numbers.below(8));
            let when = format!("bit {bit} of byte {at} of {file} is flipped");
            right_or_refused(&subject, flipped(&whole, file, at, bit)?, &sample, &when).await?;
        }
    }
    Ok(())
}
