//! Refuses ranks that do not run the job of rank 0, or do not see the place that it sees, before one of
//! them works.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp_core::digest::fnv1a_128;
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt as _};
use dcp_core::text::Quoted;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{
    CheckpointError, CollectiveError, Key, Payload, Storage, StorageError, StorageErrorKind,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Shape;
use crate::error::Error;
use crate::group::JobGroup;
use crate::options::JobOptions;
use crate::place::new_folders::NewFolders;
use crate::rollback::Rollback;

/// The beginning of the name of the file by which ranks find that they see one target. A rank that is
/// killed may leave one.
const TOKEN: &str = ".dcp-ranks.";

const SEEN: [u8; 4] = *b"dsp2";
/// Requests for the versions of files at once.
const IN_FLIGHT: usize = 16;

const ADVICE: &str = "give all ranks the same options, and paths of a file system or URLs of a store that \
                      all of them share; a job without a group runs in one process";

/// Whether this is the name of a file by which ranks find that they see one target.
pub(crate) fn is_token(key: &Key) -> bool {
    key.as_str().starts_with(TOKEN)
}

/// The group of a job that several ranks share.
fn several(job: &JobOptions) -> Option<&JobGroup> {
    job.group.as_ref().filter(|group| group.world_size() > 1)
}

fn differs(rank: usize, op: &'static str, message: String) -> Error {
    let rank = u32::try_from(rank).unwrap_or(u32::MAX);
    let error = CollectiveError::Mismatch { rank, op, message };
    Error::from(CheckpointError::from(error)).with_hint(ADVICE)
}

/// The job that a rank is about to do. Ranks with other options than rank 0 would each write their part of
/// another result.
///
/// Paths are no part of it: one place may have another path on each host, and is compared by what it holds.
#[derive(Debug)]
pub(crate) struct Work {
    job: String,
    options: Vec<(String, u128)>,
}

impl Work {
    /// The job of this name, such as "merge".
    pub(crate) fn new(name: &str, job: &JobOptions) -> Self {
        let work = Self { job: name.to_owned(), options: Vec::new() };
        work.option("dry run", &job.dry_run).option("callables", &job.callables)
    }

    /// A job whose ranks divide tensors into segments, each of which finds its own ones by
    /// their length: so the memory of a rank decides which elements it reads.
    pub(crate) fn divided(name: &str, job: &JobOptions) -> Self {
        let work = Self::new(name, job).option("`JobOptions::max_memory`", &job.max_memory);
        work.option("`JobOptions::parallelism`", &job.parallelism)
    }

    /// An option by its name, the value of which is what it is for [`Debug`](fmt::Debug).
    pub(crate) fn option(mut self, name: &str, value: &dyn fmt::Debug) -> Self {
        self.options.push((name.to_owned(), fnv1a_128(format!("{value:?}").as_bytes())));
        self
    }

    fn write_to(&self, message: &mut MessageWriter) {
        message.text(&self.job);
        message.number(self.options.len() as u64);
        for (name, value) in &self.options {
            message.text(name);
            message.bytes(&value.to_le_bytes());
        }
    }

    fn read_from(message: &mut MessageReader<'_>) -> Result<Self, CheckpointError> {
        let job = message.text()?.to_owned();
        let options = (0..message.count()?)
            .map(|_| Ok((message.text()?.to_owned(), number_of(message)?)))
            .collect::<Result<_, CheckpointError>>()?;
        Ok(Self { job, options })
    }

    /// Describes the difference of another rank's from this one, which is rank 0's.
    fn difference(&self, other: &Self) -> Option<String> {
        if self.job != other.job {
            return Some(format!(
                "it runs the job {}, and rank 0 {}",
                Quoted(&other.job),
                Quoted(&self.job)
            ));
        }
        let mut pairs = self.options.iter().zip(&other.options);
        let (name, _) = pairs.find_map(|(one, other)| (one != other).then_some(one))?;
        Some(format!("its option {} has another value than that of rank 0", Quoted(name)))
    }
}

fn number_of(message: &mut MessageReader<'_>) -> Result<u128, CheckpointError> {
    Ok(u128::from_le_bytes(message.bytes()?.try_into().unwrap_or_default()))
}

/// The view of a rank of one source.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    name: String,
    index: u128,
    files: u128,
}

impl Seen {
    fn new(name: &str, index: &[u8], files: &BTreeMap<Key, Option<ObjectMeta>>) -> Self {
        let mut message = MessageWriter::new(SEEN);
        for (key, meta) in files {
            message.text(key.as_str());
            message.number(meta.as_ref().map_or(u64::MAX, |meta| meta.byte_len));
            let version = meta.as_ref().and_then(|meta| meta.version.as_ref());
            message.text(version.map_or("", |version| version.as_str()));
        }
        let (index, files) = (fnv1a_128(index), fnv1a_128(&message.finish()));
        Self { name: name.to_owned(), index, files }
    }

    fn write_to(&self, message: &mut MessageWriter) {
        message.text(&self.name);
        message.bytes(&self.index.to_le_bytes());
        message.bytes(&self.files.to_le_bytes());
    }

    fn read_from(message: &mut MessageReader<'_>) -> Result<Self, CheckpointError> {
        let name = message.text()?.to_owned();
        Ok(Self { name, index: number_of(message)?, files: number_of(message)? })
    }

    /// Describes the difference of another rank's from this one, which is rank 0's.
    fn difference(&self, other: &Self) -> Option<String> {
        let name = Quoted(&self.name);
        if self.index != other.index {
            return Some(format!("it reads another index than rank 0 at {name}"));
        }
        if self.files != other.files {
            let what = "files of other lengths or versions than rank 0";
            return Some(format!("it sees {what} at {name}"));
        }
        None
    }
}

/// Refuses ranks that do other work than rank 0, or open other checkpoints: another index, or files of
/// other lengths or versions. All ranks fail with one error, which names the lowest of those that differ.
pub(crate) async fn same_sources(
    job: &JobOptions,
    work: Work,
    checkpoints: &[&Checkpoint],
) -> Result<(), Error> {
    let Some(group) = several(job) else { return Ok(()) };
    let mut seen = Vec::with_capacity(checkpoints.len());
    for checkpoint in checkpoints {
        let names = checkpoint.source.names().await?;
        let files = files_of(checkpoint).await?;
        seen.push(Seen::new(&checkpoint.uri, &names.to_wire(), &files));
    }
    agree(group, &work, &seen).await
}

/// Compares a source that is these files on all ranks.
pub(crate) async fn same_files(
    job: &JobOptions,
    work: Work,
    name: &str,
    files: &[ObjectMeta],
) -> Result<(), Error> {
    let Some(group) = several(job) else { return Ok(()) };
    let files = files.iter().map(|file| (file.key.clone(), Some(file.clone()))).collect();
    agree(group, &work, &[Seen::new(name, &[], &files)]).await
}

async fn agree(group: &JobGroup, work: &Work, seen: &[Seen]) -> Result<(), Error> {
    let mut message = MessageWriter::new(SEEN);
    work.write_to(&mut message);
    message.number(seen.len() as u64);
    seen.iter().for_each(|one| one.write_to(&mut message));
    let own = message.finish();
    let all = group.all_gather(own.clone()).await?;
    let first = all.first().unwrap_or(&own);
    for (rank, other) in all.iter().enumerate() {
        if let Some(difference) = difference(first, other)? {
            return Err(differs(rank, "the look at the source", difference));
        }
    }
    Ok(())
}

/// Describes the difference of the job and sources of another rank from those of rank 0.
fn difference(first: &[u8], other: &[u8]) -> Result<Option<String>, CheckpointError> {
    let decode = |bytes: &[u8]| -> Result<(Work, Vec<Seen>), CheckpointError> {
        let mut message = MessageReader::new(bytes, SEEN)?;
        let work = Work::read_from(&mut message)?;
        let seen =
            (0..message.count()?).map(|_| Seen::read_from(&mut message)).collect::<Result<_, _>>();
        message.finish()?;
        Ok((work, seen?))
    };
    let ((work, seen), (other_work, other_seen)) = (decode(first)?, decode(other)?);
    if let Some(difference) = work.difference(&other_work) {
        return Ok(Some(difference));
    }
    if seen.len() != other_seen.len() {
        return Ok(Some("it opens other checkpoints than rank 0".to_owned()));
    }
    Ok(seen.iter().zip(&other_seen).find_map(|(one, other)| one.difference(other)))
}

/// The files of a checkpoint: those that its index names, and those that its formats own; `None` for
/// one that is missing.
async fn files_of(checkpoint: &Checkpoint) -> Result<BTreeMap<Key, Option<ObjectMeta>>, Error> {
    let source = &checkpoint.source;
    let mut files: BTreeMap<Key, Option<ObjectMeta>> = BTreeMap::new();
    if checkpoint.is_folder {
        let opener = &checkpoint.opener;
        let place = opener.look(&checkpoint.place, &checkpoint.storage).await?;
        let root = place.listing().root();
        for file in place.listing().objects() {
            let first = file.key.as_str().split('/').next().unwrap_or_default();
            if opener.formats.owns(&root, first) {
                files.insert(file.key.clone(), Some(file.clone()));
            }
        }
    }
    let names = source.names().await?;
    let unlisted: Vec<Key> =
        names.files().iter().filter(|key| !files.contains_key(key)).cloned().collect();
    let stats = unlisted.into_iter().map(|key| async move {
        match source.storage.stat(&key).await {
            Ok(meta) => Ok((key, Some(meta))),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Ok((key, None)),
            Err(error) => Err(error),
        }
    });
    // A stream over the closure itself would not be `Send`.
    let stats: Vec<_> = stats.collect();
    let stats: Vec<_> = stream::iter(stats).buffered(IN_FLIGHT).try_collect().await?;
    files.extend(stats);
    Ok(files)
}

/// The check that ranks see one target: rank 0 writes a file with a number there, which all others
/// read, and removes it. Nothing is exchanged in a dry run, which makes nothing.
#[derive(Debug)]
pub(crate) struct SharedTarget<'a> {
    group: Option<&'a JobGroup>,
    number: Vec<u8>,
}

impl<'a> SharedTarget<'a> {
    /// Waits until rank 0 has opened and claimed the target, before this rank opens it: so rank 0 sees
    /// which folders are new.
    ///
    /// Returns those folders, too. Rank 0 may leave before the files of another rank are removed.
    pub(crate) async fn begin(
        job: &'a JobOptions,
        shape: Shape,
        target: &str,
        rollback: &Rollback,
    ) -> Result<(Self, NewFolders), Error> {
        // One file is written by rank 0.
        let group = several(job).filter(|_| !job.dry_run && shape == Shape::Folder);
        if let Some(others) = group.filter(|group| !group.is_coordinator()) {
            let number = others.broadcast(Vec::new().into()).await?.to_vec();
            let text = String::from_utf8_lossy(&number);
            let count = text.rsplit('-').next().and_then(|count| count.parse().ok());
            let folders = NewFolders::found_missing(target, count.unwrap_or(0), rollback);
            return Ok((Self { group, number }, folders));
        }
        let folders = NewFolders::before(target, rollback);
        let number = format!("{:032x}-{}", number(), folders.count()).into_bytes();
        Ok((Self { group, number }, folders))
    }

    /// Refuses ranks that do not see the target of rank 0. All ranks fail with one error, which names the
    /// lowest of those.
    pub(crate) async fn agree(self, target: &str, storage: &Arc<dyn Storage>) -> Result<(), Error> {
        let Some(group) = self.group else { return Ok(()) };
        let number = self.number;
        let token = format!("{TOKEN}{}", String::from_utf8_lossy(&number));
        let token = Key::new(token).map_err(StorageError::from)?;
        if group.is_coordinator() {
            let written = storage.put(&token, Payload::from(number.clone()), PutMode::Create).await;
            let context = || format!("cannot write to {target:?}");
            written.map_err(|error| Error::from(error).context(context()))?;
        }
        let agreed = async {
            let sees = match group.is_coordinator() {
                true => {
                    group.broadcast(number.into()).await?;
                    true
                }
                false => sees(&**storage, &token, &number).await?,
            };
            group.all_gather(vec![u8::from(sees)].into()).await
        };
        let agreed = agreed.await;
        let removed = match group.is_coordinator() {
            true => storage.delete(&[token]).await,
            false => Ok(()),
        };
        let agreed = agreed?;
        removed?;
        match agreed.iter().position(|sees| **sees != [1]) {
            None => Ok(()),
            Some(rank) => {
                let message = format!("it does not see what rank 0 writes to {}", Quoted(target));
                Err(differs(rank, "the look at the target", message))
            }
        }
    }
}

/// Whether the file of rank 0 is here.
async fn sees(storage: &dyn Storage, token: &Key, number: &[u8]) -> Result<bool, CheckpointError> {
    match storage.read_all(token).await {
        Ok(bytes) => Ok(bytes == number),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A number that no other job has.
fn number() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    fnv1a_128(format!("{} {}", since.as_nanos(), std::process::id()).as_bytes())
}
