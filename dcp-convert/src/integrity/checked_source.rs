//! A source whose reads are compared with their checksums, and the proof that they were.

use std::ops::Deref;
use std::sync::Arc;

use dcp_core::{CheckpointError, StorageReader};

use crate::integrity::incremental_crc::Checked;
use crate::job::JobOptions;
use crate::source::Source;
use crate::source::decode_cache::DecodedOnce;

/// A [`Source`] as a job reads it: no chunk is decoded once for each of its parts, and what is
/// read in parts is compared with its checksum on the way.
///
/// [`finish`](Self::finish) compares what is left and returns the [`Verified`] without which
/// nothing is published.
#[derive(Debug)]
#[must_use = "call `finish`, or what was read may be damaged"]
pub struct CheckedSource {
    source: Source,
    options: JobOptions,
}

/// The proof that all that a job read is undamaged. [`CheckedSource::finish`] alone makes one, and
/// every step that makes a target visible consumes one.
///
/// ```
/// # use bytes::Bytes;
/// # use dcp_convert::{CheckedSource, ConvertError, JobOptions, Source, Target};
/// # async fn example(source: Source, target: Target, new: Bytes) -> Result<(), ConvertError> {
/// let source = CheckedSource::new(&source, &JobOptions::default());
/// // Read through `source`, make the file, then:
/// target.put(new, source.finish().await?).await
/// # }
/// ```
///
/// A program that leaves out the comparison does not compile:
///
/// ```compile_fail
/// # use bytes::Bytes;
/// # use dcp_convert::{ConvertError, Target, Verified};
/// # async fn example(target: Target, new: Bytes) -> Result<(), ConvertError> {
/// target.put(new, Verified(())).await
/// # }
/// ```
#[derive(Debug)]
#[must_use = "publish with it, or return what was read"]
pub struct Verified(());

impl CheckedSource {
    /// `source` for a job with these options. Of a view, the checkpoints that it shows are compared.
    pub fn new(source: &Source, options: &JobOptions) -> Self {
        let options = JobOptions { progress: None, ..options.clone() };
        if !source.comparisons().is_empty() {
            return Self { source: source.clone(), options };
        }
        let checked = Arc::new(Checked::new(source.clone()));
        let reader = DecodedOnce::new(Arc::clone(&checked) as _, options.parallelism);
        Self { source: source.comparing(Arc::new(reader), vec![checked]), options }
    }

    /// The same reads, shown by a `reader` over this one's.
    pub(crate) fn shown_by(self, reader: Arc<dyn StorageReader>) -> Self {
        let source = Source::derived(reader, std::slice::from_ref(&self));
        Self { source: source.unwrap_or(self.source), options: self.options }
    }

    /// The same reads as a source, for a view over it or for looking around. A job on the view
    /// compares them when it finishes.
    #[must_use]
    pub fn into_source(self) -> Source {
        self.source
    }

    /// Reads again, and compares, those chunks of which all was read, but in such parts that their
    /// checksums could not be compared on the way.
    ///
    /// # Errors
    ///
    /// When one is damaged, or the storage fails.
    pub async fn finish(self) -> Result<Verified, CheckpointError> {
        for comparison in self.source.comparisons() {
            comparison.settle(&self.options).await?;
        }
        Ok(Verified(()))
    }
}

/// What a source can do is done with its reads compared.
impl Deref for CheckedSource {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.source
    }
}

impl Source {
    /// What `reader` makes of `parts`, which it reads through these checked forms. Its metadata may
    /// only place what lies, unchanged, in the storage of the first part.
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
