//! A source that compares its reads with checksums, and the proof that it did.

use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{CheckpointError, StorageReader};

use crate::integrity::incremental_crc::Checked;
use crate::options::JobOptions;
use crate::source::Source;
use crate::source::decode_cache::DecodedOnce;

/// A [`Source`] for the duration of a job. It decodes each chunk once, not once per segment, and
/// compares chunks that are read in segments with their checksums on the way.
/// [`finish`](Self::finish) compares the rest and returns the [`Verified`] that publishing a target
/// requires.
#[derive(Debug)]
#[must_use = "call `finish`, or what was read may be damaged"]
pub struct CheckedSource {
    source: Source,
    options: JobOptions,
}

/// Proof that everything a job read is undamaged. Only [`CheckedSource::finish`] creates one, and
/// every step that makes a target visible consumes one.
///
/// ```
/// # use bytes::Bytes;
/// # use dcp_jobs::integrity::CheckedSource;
/// # use dcp_jobs::{JobError, JobOptions, Source};
/// # use dcp_jobs::write::Target;
/// # async fn example(source: Source, target: Target, new: Bytes) -> Result<(), JobError> {
/// let source = CheckedSource::new(&source, &JobOptions::default());
/// // Read through `source`, make the file, then:
/// target.put(new, source.finish().await?).await
/// # }
/// ```
///
/// A program without the comparison does not compile:
///
/// ```compile_fail
/// # use bytes::Bytes;
/// # use dcp_jobs::JobError;
/// # use dcp_jobs::write::Target;
/// # use dcp_jobs::integrity::Verified;
/// # async fn example(target: Target, new: Bytes) -> Result<(), JobError> {
/// target.put(new, Verified(())).await
/// # }
/// ```
#[derive(Debug)]
#[must_use = "publish with it, or return what was read"]
pub struct Verified(());

impl CheckedSource {
    /// Opens `source` for a job with these options. For a view, the checkpoints below it are
    /// compared.
    pub fn new(source: &Source, options: &JobOptions) -> Self {
        let options = JobOptions { progress: None, ..options.clone() };
        if !source.comparisons().is_empty() {
            return Self { source: source.clone(), options };
        }
        let checked = Arc::new(Checked::new(source.clone()));
        let reader = DecodedOnce::new(Arc::clone(&checked) as _, options.parallelism);
        Self { source: source.comparing(Arc::new(reader), vec![checked]), options }
    }

    /// These reads, presented by a `reader` that reads from this one's.
    pub(crate) fn shown_by(self, reader: Arc<dyn StorageReader>) -> Self {
        let source = Source::derived(reader, std::slice::from_ref(&self));
        Self { source: source.unwrap_or(self.source), options: self.options }
    }

    /// These reads as a source, to build a view over it or to inspect it. A job on the view
    /// makes the comparisons when it finishes.
    #[must_use]
    pub fn into_source(self) -> Source {
        self.source
    }

    /// Reads again and compares the chunks that were read in full, but in parts whose checksums
    /// could not be combined. In a group, a chunk may have been read by several ranks, and all ranks
    /// wait until each has compared what it is to compare.
    ///
    /// # Errors
    ///
    /// When a chunk is damaged, or the storage fails.
    pub async fn finish(self) -> Result<Verified, CheckpointError> {
        for comparison in self.source.comparisons() {
            comparison.settle(&self.options).await?;
        }
        if let Some(group) = &self.options.group {
            group.all_gather(Bytes::new()).await?;
        }
        Ok(Verified(()))
    }
}

/// A source's methods are available, with their reads compared.
impl Deref for CheckedSource {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.source
    }
}

impl Source {
    /// The source that `reader` derives from `parts`, which it reads through these checked forms.
    /// Its metadata may place only data that the storage of the first part holds unchanged.
    ///
    /// Returns `None` when there are no parts.
    #[must_use]
    pub fn derived(reader: Arc<dyn StorageReader>, parts: &[CheckedSource]) -> Option<Self> {
        let storage = Arc::clone(&parts.first()?.storage);
        let comparisons = parts.iter().flat_map(|part| part.comparisons().iter().cloned());
        let comparisons = comparisons.collect();
        Some(Self::new(storage, Arc::clone(&reader)).comparing(reader, comparisons))
    }
}
