//! The formats that are known.

use std::borrow::Cow;
use std::sync::Arc;

use super::CheckpointFormat;
use super::listing::{Folder, Listing};
use super::opened::{OpenOptions, OpenedCheckpoint, Place};
use super::recognized::{Evidence, FormatInfo, Recognized, RunSelection, UnfinishedSave};
use super::stream_transform::{StreamTransform, StreamTransforms};
use super::subfolder::Subfolder;
use super::target::{CheckpointTarget, Occupant};
use crate::error::{CheckpointError, StorageError};
use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;
use crate::storages::storage::{Storage, StorageExt};

/// The first bytes of a file, which show its format.
const HEAD_BYTES: u64 = 64;

/// The formats that checkpoints are recognized and opened by.
///
/// Of formats that recognize a folder by equal [`Evidence`], the one registered last opens it, so
/// that a plug-in comes before the formats that it builds on.
#[derive(Clone, Debug, Default)]
pub struct FormatRegistry {
    /// The one that was registered last comes first.
    formats: Vec<Arc<dyn CheckpointFormat>>,
    transforms: StreamTransforms,
}

/// A format that recognizes a folder.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FolderMatch {
    /// The format.
    pub format: Arc<dyn CheckpointFormat>,
    /// The folder as the format recognizes it.
    pub found: Recognized,
}

impl FolderMatch {
    /// Whether checkpoints of this format are made of those of `other`, as Megatron-Core's are of PyTorch's.
    #[must_use]
    pub fn has_part(&self, other: &dyn CheckpointFormat) -> bool {
        let parts = self.format.target().map_or(&[][..], CheckpointTarget::parts);
        parts.contains(&other.info().name)
    }
}

impl FormatRegistry {
    /// No format at all.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// Adds a format, or replaces the one of the same name in its place.
    pub fn register(&mut self, format: Arc<dyn CheckpointFormat>) {
        let name = format.info().name;
        match self.formats.iter_mut().find(|known| known.info().name == name) {
            Some(known) => *known = format,
            None => self.formats.insert(0, format),
        }
    }

    /// Adds a format, as [`register`](Self::register) does.
    #[must_use]
    pub fn with(mut self, format: Arc<dyn CheckpointFormat>) -> Self {
        self.register(format);
        self
    }

    /// Adds a transform of stored items, which readers of formats that have such undo, or replaces the one of the same
    /// name. Without it, they refuse the items that an index says were written through it.
    #[must_use]
    pub fn with_transform(mut self, transform: Arc<dyn StreamTransform>) -> Self {
        self.transforms.register(transform);
        self
    }

    /// The transforms of stored items.
    #[must_use]
    pub fn transforms(&self) -> &StreamTransforms {
        &self.transforms
    }

    /// The formats, the one registered last first.
    #[must_use]
    pub fn formats(&self) -> &[Arc<dyn CheckpointFormat>] {
        &self.formats
    }

    /// The format of that name.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&Arc<dyn CheckpointFormat>> {
        self.formats.iter().find(|format| format.info().name == name)
    }

    /// All that formats say of a folder, the strongest evidence first. [`Evidence::Trace`] counts
    /// only where there is nothing else.
    #[must_use]
    pub fn recognize(&self, folder: &Folder<'_>) -> Vec<FolderMatch> {
        let mut found = self.matches(folder);
        found.sort_by_key(|one| std::cmp::Reverse(one.found.evidence));
        let traces = found.first().is_some_and(|best| best.found.evidence == Evidence::Trace);
        found.retain(|one| traces || one.found.evidence > Evidence::Trace);
        found
    }

    /// The format that a folder in the listing of a run belongs to: of the last registered format
    /// that finds a checkpoint, or the remains of one, in the folder itself; else of one that finds
    /// it in a folder below; else of one whose files lie there. The remains of a save, and files without an index, do
    /// not hide the index of a format that this one does not build on.
    #[must_use]
    pub fn classify(&self, folder: &Folder<'_>) -> Option<FolderMatch> {
        let mut found = self.matches(folder);
        let rank = |one: &FolderMatch| match one.found.evidence {
            Evidence::Index | Evidence::Remains | Evidence::Files => Some(0),
            Evidence::Run if one.found.inner.is_some() || one.found.problem.is_some() => Some(1),
            Evidence::Loose => Some(2),
            Evidence::Run | Evidence::Trace => None,
        };
        found.retain(|one| rank(one).is_some());
        let first = found.iter().min_by_key(|one| rank(one))?;
        if matches!(first.found.evidence, Evidence::Remains | Evidence::Files) {
            let is_other = |one: &&FolderMatch| {
                one.found.evidence == Evidence::Index && !first.has_part(&*one.format)
            };
            if let Some(other) = found.iter().find(is_other) {
                return Some(other.clone());
            }
        }
        Some(first.clone())
    }

    /// The formats other than that of `first` that find an index in a folder, and by its names miss nothing. Where
    /// `first` has a problem, the checkpoint may be of one of them, beside files that only have the names of the first.
    #[must_use]
    pub fn others(&self, folder: &Folder<'_>, first: &FolderMatch) -> Vec<FolderMatch> {
        let name = first.format.info().name;
        let mut found = self.matches(folder);
        found.retain(|one| {
            let is_whole = one.found.evidence == Evidence::Index && one.found.problem.is_none();
            is_whole && one.found.inner.is_none() && one.format.info().name != name
        });
        found
    }

    /// The formats that recognize the folder, the one registered last first.
    fn matches(&self, folder: &Folder<'_>) -> Vec<FolderMatch> {
        let found = self.formats.iter().filter_map(|format| {
            let found = format.recognize(folder)?;
            Some(FolderMatch { format: Arc::clone(format), found })
        });
        found.collect()
    }

    /// Lists a folder, and reads the small files that formats need to recognize it.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn look(&self, storage: &Arc<dyn Storage>) -> Result<Place, StorageError> {
        let landmarks: Vec<_> =
            self.formats.iter().flat_map(|format| format.info().landmarks).copied().collect();
        let listing = Listing::read(&**storage, &landmarks).await?;
        self.peek(storage, listing).await
    }

    /// Looks at a folder below one that was looked at, which is listed already.
    ///
    /// # Errors
    ///
    /// When `folder` is no name of a folder, and when the storage fails.
    pub async fn look_below(&self, place: &Place, folder: &str) -> Result<Place, StorageError> {
        let inner = Subfolder::new(Arc::clone(place.storage()), Key::new(folder)?);
        let storage: Arc<dyn Storage> = Arc::new(inner);
        self.peek(&storage, place.listing().below(folder)).await
    }

    /// Reads the small files that formats need to recognize a folder.
    async fn peek(
        &self,
        storage: &Arc<dyn Storage>,
        mut listing: Listing,
    ) -> Result<Place, StorageError> {
        // Formats after one that finds its index by names alone would not open the folder.
        let root = listing.root();
        let finds_index = |format: &Arc<dyn CheckpointFormat>| {
            format.recognize(&root).is_some_and(|found| found.evidence == Evidence::Index)
        };
        let requested =
            self.formats.iter().position(finds_index).map_or(self.formats.len(), |at| at + 1);
        let peeks = self.formats.iter().take(requested).flat_map(|format| format.peeks(&root));
        let peeks = peeks.collect();
        listing.peek(&**storage, peeks).await?;
        Ok(Place::folder(storage, listing))
    }

    /// Opens the checkpoint in a folder, or in the folder below that its format names.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`], which says what the folder holds, when no format
    /// recognizes a checkpoint in it; and when its index is bad.
    pub async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        self.open_place(&self.look(storage).await?, options).await
    }

    /// Opens the checkpoint in a folder that was [looked at](Self::look).
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub async fn open_place(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let outer = place;
        let mut place = place.clone();
        let mut matches = self.recognize(&place.listing().root());
        // A folder in a folder, but no further: names in a hostile listing could go on for long.
        for _ in 0..2 {
            let Some(best) = matches.first().filter(|best| best.found.is_checkpoint()) else {
                break;
            };
            let Some(inner) = &best.found.inner else {
                return self.open_first(&matches, &place, options).await;
            };
            place = self.look_below(&place, inner).await?;
            matches = self.recognize(&place.listing().root());
        }
        let message = self.explain(&outer.listing().root());
        Err(CheckpointError::NotACheckpoint { message })
    }

    /// Opens the checkpoint in a folder by the first of `matches`, or [another one](Self::open_match).
    pub(super) async fn open_first(
        &self,
        matches: &[FolderMatch],
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let Some(best) = matches.first() else {
            let message = self.explain(&place.listing().root());
            return Err(CheckpointError::NotACheckpoint { message });
        };
        self.open_match(best, place, options).await.1
    }

    /// Opens the checkpoint in a folder by the format of `best`. Where that finds none of its checkpoints, because a
    /// file only has a name of its, by the first of the [others](Self::others) that does. The format is returned with
    /// the result. A checkpoint with none of the [keys](OpenOptions::keys) of `options` is opened with all that it has.
    pub async fn open_match(
        &self,
        best: &FolderMatch,
        place: &Place,
        options: &OpenOptions,
    ) -> (FolderMatch, Result<OpenedCheckpoint, CheckpointError>) {
        let options = &*self.with_own_transforms(options);
        let opened = open_by(&*best.format, place, options).await;
        if matches!(opened, Err(CheckpointError::NotACheckpoint { .. })) {
            for other in self.others(&place.listing().root(), best) {
                if let Ok(opened) = open_by(&*other.format, place, options).await {
                    return (other, Ok(opened));
                }
            }
        }
        (best.clone(), opened)
    }

    /// The format of a checkpoint that is one file, by its name and its first bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`] when no format recognizes it, and when the storage fails.
    pub async fn recognize_file(
        &self,
        storage: &Arc<dyn Storage>,
        file: &Key,
    ) -> Result<&Arc<dyn CheckpointFormat>, CheckpointError> {
        let len = storage.stat(file).await?.byte_len;
        let head = storage.read_range(file, 0..len.min(HEAD_BYTES)).await?;
        let recognizes =
            |format: &&Arc<dyn CheckpointFormat>| format.recognize_file(file.file_name(), &head);
        self.formats.iter().find(recognizes).ok_or_else(|| {
            let known: Vec<_> = self.formats.iter().map(|format| format.info().title).collect();
            let message = format!("{file} is not a file of {}", known.join(", "));
            CheckpointError::NotACheckpoint { message }
        })
    }

    /// Opens a checkpoint that is one file.
    ///
    /// # Errors
    ///
    /// As [`recognize_file`](Self::recognize_file), and when its index is bad.
    pub async fn open_file(
        &self,
        storage: &Arc<dyn Storage>,
        file: Key,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let format = self.recognize_file(storage, &file).await?;
        format.open(&Place::file_of(storage, file), &self.with_own_transforms(options)).await
    }

    /// Returns the options with the transforms of this registry, where they have none.
    fn with_own_transforms<'a>(&self, options: &'a OpenOptions) -> Cow<'a, OpenOptions> {
        match self.transforms.is_empty() || !options.transforms.is_empty() {
            true => Cow::Borrowed(options),
            false => Cow::Owned(options.clone().with_transforms(self.transforms.clone())),
        }
    }

    /// Describes the contents of a folder, as the predicate of a sentence.
    #[must_use]
    pub fn describe(&self, folder: &Folder<'_>) -> String {
        let mut matches = self.recognize(folder);
        // Checkpoints in folders below are listed in the end.
        let is_outer = |found: &Recognized| {
            found.evidence == Evidence::Run && (found.inner.is_some() || found.problem.is_some())
        };
        matches.retain(|one| !is_outer(&one.found));
        let mut text = match &*matches {
            [] if folder.is_empty() => "is empty or does not exist".to_owned(),
            [] => "has no .metadata, and no file by which another format is recognized".to_owned(),
            [first, ..] => first.found.description.clone(),
        };
        for more in matches.iter().skip(1) {
            text.push_str(&format!("; it also {}", more.found));
        }
        text
    }

    /// Selects the checkpoint of a run, by the first format that has a rule.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        for format in &self.formats {
            let selected = format.select(run).await?;
            if selected.is_some() {
                return Ok(selected);
            }
        }
        Ok(None)
    }

    /// Finds the sign that the save of a folder did not finish; see [`CheckpointFormat::unfinished`].
    #[must_use]
    pub fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<(FormatInfo, UnfinishedSave)> {
        self.formats
            .iter()
            .find_map(|format| Some((format.info(), format.unfinished(folder, metadata)?)))
    }

    /// Whether the file or folder `name` in `folder` is a part of a checkpoint of a format that
    /// recognizes the folder.
    #[must_use]
    pub fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        self.formats
            .iter()
            .any(|format| format.owns(folder, name) && format.recognize(folder).is_some())
    }

    /// Finds the formats whose files in `folder` refuse a checkpoint there, with those files; see
    /// [`CheckpointFormat::occupant`].
    #[must_use]
    pub fn occupants(&self, folder: &Folder<'_>) -> Vec<(FormatInfo, Occupant)> {
        let found =
            |format: &Arc<dyn CheckpointFormat>| Some((format.info(), format.occupant(folder)?));
        self.formats.iter().filter_map(found).collect()
    }

    /// Describes the contents of a folder without a checkpoint, as a message.
    #[must_use]
    pub fn explain(&self, folder: &Folder<'_>) -> String {
        let mut text = format!("not a checkpoint: the directory {}", self.describe(folder));
        let below = self.checkpoints_below(folder);
        match &*below {
            [] => {}
            [one] => text.push_str(&format!("; there is a checkpoint in {one:?}")),
            [.., last] => {
                let count = below.len();
                text.push_str(&format!(
                    "; there are {count} checkpoints in folders below it, such as {last:?}"
                ));
            }
        }
        text
    }

    /// Paths of folders with a checkpoint, one and two levels down, in natural order of their
    /// names.
    #[must_use]
    pub fn checkpoints_below(&self, folder: &Folder<'_>) -> Vec<String> {
        let mut found = Vec::new();
        let is_whole = |folder: &Folder<'_>| {
            self.formats.iter().any(|format| {
                let found = format.recognize(folder);
                found
                    .is_some_and(|found| found.evidence == Evidence::Index && found.inner.is_none())
            })
        };
        for below in folder.folders() {
            if is_whole(&below) {
                found.push(below.path().to_owned());
                continue;
            }
            let inner = below.folders().filter(is_whole);
            found.extend(inner.map(|folder| folder.path().to_owned()));
        }
        found.sort_by_cached_key(|path| natural(path));
        found
    }
}

/// A sort key in which `step_9` comes before `step_10`.
#[must_use]
pub fn natural(name: &str) -> Vec<(String, u128)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits_at = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits_at);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (digits, tail) = tail.split_at(end);
        parts.push((text.to_owned(), digits.parse().unwrap_or(u128::MAX)));
        rest = tail;
    }
    parts
}

/// Opens a checkpoint by a format with the keys that are needed, or with all where it has none of those.
async fn open_by(
    format: &dyn CheckpointFormat,
    place: &Place,
    options: &OpenOptions,
) -> Result<OpenedCheckpoint, CheckpointError> {
    let opened = format.open(place, options).await?;
    let (Some(keys), Some(names)) = (&options.keys, &opened.names) else { return Ok(opened) };
    match keys.of(names).contains(&true) {
        true => Ok(opened),
        false => format.open(place, &options.clone().with_keys(None)).await,
    }
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn numbers_sort_as_numbers() {
        let mut names = vec!["step_10", "step_9", "step_9/ema", "a", "step_100"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["a", "step_9", "step_9/ema", "step_10", "step_100"]);
    }
}
