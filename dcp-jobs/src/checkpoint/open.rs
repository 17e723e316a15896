//! From a URL to a checkpoint to read.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use dcp_core::format::{
    CheckpointTarget, FormatInfo, InnerCheckpoint, Occupant, OpenedCheckpoint, Place,
    RankDifference, RunSelection, UnfinishedSave,
};
use dcp_core::registry::Access;
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::metadata::ProfileChoice;

use crate::checkpoint::no_checkpoint::{cannot_read, not_fetched};
use crate::checkpoint::notes::Notes;
use crate::checkpoint::opener::{Need, Opener};
use crate::checkpoint::text::list;
use crate::checkpoint::uri::{below, local_path, split};
use crate::checkpoint::{Checkpoint, OfFramework, TrackerProblem};
use crate::error::{Error, ErrorKind};
use crate::listing::{RunListing, list_run_without};
use crate::source::Source;
use crate::write::MetadataRewrite;

/// A folder that was found to hold a checkpoint.
struct Found {
    uri: String,
    place: Place,
    /// The folder of the checkpoint: of a step of OLMo-core the one above `place`.
    step: Place,
    step_uri: String,
    tracker_problem: Option<TrackerProblem>,
}

impl Opener {
    /// Opens the checkpoint at a URL: a directory, a run of them, or one file of safetensors or
    /// `torch.save`. What it is follows from its content; a note says which of several is opened.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound), [`NotACheckpoint`](ErrorKind::NotACheckpoint),
    /// [`Damaged`](ErrorKind::Damaged), [`Unfinished`](ErrorKind::Unfinished) when no checkpoint of
    /// a run is complete, [`Undecided`](ErrorKind::Undecided) when ranks differ and all of it is
    /// needed.
    pub async fn open(&self, uri: &str) -> Result<Checkpoint, Error> {
        let mut notes = self.notes();
        match self.open_noting(uri, &mut notes).await {
            Ok(opened) => {
                if let (Need::Whole, Some(pointer)) = (self.need, opened.unfetched_data().await?) {
                    return Err(not_fetched(uri, &pointer));
                }
                // A reader of the folder does not see the file, and takes what is there for all.
                if self.need == Need::Whole
                    && opened.is_folder
                    && let Some(refused) = self.refused_link(&opened.step_uri).await
                {
                    return Err(cannot_read(uri, refused));
                }
                Ok(Checkpoint { notes: notes.into_said(), ..opened })
            }
            Err(error) => Err(self.unfetched(uri, &error).await.unwrap_or(error)),
        }
    }

    async fn open_noting(&self, uri: &str, notes: &mut Notes) -> Result<Checkpoint, Error> {
        let opened =
            |(place, step, step_uri), format: FormatInfo, found: OpenedCheckpoint| Checkpoint {
                opener: self.for_keys(None),
                has_all_keys: found.names.is_none(),
                uri: uri.to_owned(),
                place,
                step,
                step_uri,
                format,
                storage: Arc::clone(&found.storage),
                is_folder: true,
                framework: self
                    .frameworks
                    .checkpoint(format, &found)
                    .map(|(framework, checkpoint)| OfFramework { framework, checkpoint }),
                source: Source::from(found),
                unfinished: None,
                tracker_problem: None,
                notes: Vec::new(),
            };
        let storage = match self.storages.open(uri, Access::Read).await {
            Ok(storage) => storage,
            Err(error) => {
                let Some(file) = self.file(uri).await else { return Err(cannot_open(uri, error)) };
                return self.open_one(uri, file, notes, opened).await;
            }
        };
        let found = self.find(uri, &storage, notes).await?;
        // An object store has no folders that could be missing.
        if found.uri == uri
            && found.place.listing().root().is_empty()
            && let Some(file) = self.file(uri).await
        {
            return self.open_one(uri, file, notes, opened).await;
        }
        let Found { uri: at, place, step, step_uri, tracker_problem } = found;
        let here = || (at.clone(), step.clone(), step_uri.clone());
        let folder = place.listing().root();
        let matches = self.formats.recognize(&folder);
        let best = matches.first().filter(|best| best.found.is_checkpoint());
        let Some(best) = best else { return self.open_untracked(uri, &at, &place, notes).await };
        // The checkpoint of a framework is opened as it is: the choices below are those of plain formats.
        let is_framework = self.frameworks.names().contains(&best.format.info().name);
        if let Some(variant) = &self.variant
            && !is_framework
        {
            let (format, found) = self.open_variant(&at, &place, variant).await?;
            return Ok(opened(here(), format, found));
        }
        let (best, found) = self.formats.open_match(best, &place, &self.options()).await;
        let is_framework = self.frameworks.names().contains(&best.format.info().name);
        match found {
            Ok(found) => {
                if !is_framework {
                    self.settle_ranks(uri, &found.differing)?;
                }
                found.notes.iter().for_each(|note| notes.say(note));
                if self.rank.is_none() && !found.differing.is_empty() {
                    notes.say("`Opener::rank` shows what another rank has");
                }
                note_variants(&found.variants, notes);
                let mut opened = opened(here(), best.format.info(), found);
                opened.tracker_problem = tracker_problem;
                if !is_framework {
                    let metadata = opened.source.metadata().await?;
                    let unfinished = self.formats.unfinished(&folder, &metadata);
                    if let Some((_, unfinished)) = unfinished {
                        notes.say(read_all_the_same(&unfinished));
                        opened.unfinished = Some(unfinished);
                    }
                }
                Ok(opened)
            }
            Err(error) if is_missing(&error) && !is_framework => {
                if folder.has(".metadata") {
                    return Err(error.into());
                }
                self.open_untracked(uri, &at, &place, notes).await
            }
            Err(error) => {
                if let (Need::Whole, None, CheckpointError::Format(_)) =
                    (self.need, self.rank, &error)
                {
                    // Tensors of ranks that differ in dtype or shape need a choice, too.
                    let tolerant = self.options().with_tolerant(true);
                    if let Ok(found) = best.format.open(&place, &tolerant).await {
                        self.settle_ranks(uri, &found.differing)?;
                    }
                }
                Err(cannot_read(if is_framework { &at } else { uri }, error))
            }
        }
    }

    /// Opens a checkpoint that is one file.
    async fn open_one(
        &self,
        uri: &str,
        (storage, key): (Arc<dyn Storage>, Key),
        notes: &mut Notes,
        opened: impl FnOnce((String, Place, String), FormatInfo, OpenedCheckpoint) -> Checkpoint,
    ) -> Result<Checkpoint, Error> {
        let (format, found) = self.open_file(uri, &storage, key.clone()).await?;
        found.notes.iter().for_each(|note| notes.say(note));
        let file = Place::file_of(&storage, key);
        let opened = opened((uri.to_owned(), file, uri.to_owned()), format, found);
        Ok(Checkpoint { is_folder: false, storage, ..opened })
    }

    /// Looks at the folder at a URI.
    pub(crate) async fn look(
        &self,
        uri: &str,
        storage: &Arc<dyn Storage>,
    ) -> Result<Place, StorageError> {
        let name = split(uri).map(|(_, name)| name);
        Ok(self.formats.look(storage).await?.with_name(name))
    }

    /// Finds the checkpoint in a folder: the folder itself, the one below that its format names,
    /// such as `model_and_optim` of OLMo-core, or the iteration that the tracker of a run names.
    async fn find(
        &self,
        uri: &str,
        storage: &Arc<dyn Storage>,
        notes: &mut Notes,
    ) -> Result<Found, Error> {
        let place = self.look(uri, storage).await?;
        let (step, step_uri) = (place.clone(), uri.to_owned());
        let mut found = Found { uri: uri.to_owned(), place, step, step_uri, tracker_problem: None };
        // A folder in the iteration of a run, and no further: a hostile listing could go on.
        for _ in 0..2 {
            let mut is_step = false;
            let folder = match self.formats.inner_checkpoint(&found.place).await? {
                None => break,
                Some(InnerCheckpoint::Folder(folder)) => folder,
                Some(InnerCheckpoint::Selected(selection)) => {
                    let folder = selected(&found.uri, &selection, notes)?;
                    found.tracker_problem = selection.tracker.zip(selection.tracker_problem);
                    is_step = true;
                    folder
                }
                Some(InnerCheckpoint::Part(part)) => {
                    // A part that is such a link would be left out in silence.
                    if self.need == Need::Whole
                        && let Some(refused) = self.refused_link(&found.uri).await
                    {
                        return Err(cannot_read(uri, refused));
                    }
                    let mut others = self.formats.checkpoints_below(&found.place.listing().root());
                    others.retain(|other| *other != part);
                    notes.say(format!(
                        "{:?} has several checkpoints that belong together; opening {part}, not {}",
                        found.uri,
                        others.join(", ")
                    ));
                    part
                }
                Some(_) => break,
            };
            found.uri = below(&found.uri, &folder);
            found.place = self.formats.look_below(&found.place, &folder).await?;
            if found.place.listing().root().is_empty() {
                // A link to another place, or a storage that cannot list.
                let storage = self.storages.open(&found.uri, Access::Read).await?;
                found.place = self.look(&found.uri, &storage).await?;
            }
            if is_step {
                (found.step, found.step_uri) = (found.place.clone(), found.uri.clone());
            }
        }
        Ok(found)
    }

    /// Opens the last iteration of a run that has no tracker, or explains why there is none.
    async fn open_untracked(
        &self,
        uri: &str,
        at: &str,
        place: &Place,
        notes: &mut Notes,
    ) -> Result<Checkpoint, Error> {
        if let Ok(Some(last)) = self.formats.select(place).await
            && let Ok(folder) = selected(uri, &last, notes)
        {
            let place = below(at, &folder);
            let opened = Box::pin(self.open_noting(&place, notes)).await?;
            return Ok(Checkpoint { uri: uri.to_owned(), ..opened });
        }
        Err(self.no_checkpoint(uri, place).await)
    }

    /// Lists the checkpoints in the folder of a run.
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_jobs::Opener) -> Result<(), dcp_jobs::Error> {
    /// let run = opener.list("runs/llama").await?;
    /// println!("{:?} is the latest of {}", run.latest, run.entries.len());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// When the folder cannot be opened or listed.
    pub async fn list(&self, uri: &str) -> Result<RunListing, Error> {
        let storage = self.storages.open(uri, Access::Read).await;
        let storage = storage.map_err(|error| cannot_open(uri, error))?;
        let refused = self.refused_links(uri).await;
        Ok(list_run_without(&storage, &self.formats, &refused).await?)
    }

    /// Describes a folder that is two checkpoints at once: which of them is opened.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn ambiguity(&self, uri: &str) -> Result<Option<String>, Error> {
        let Ok(storage) = self.storages.open(uri, Access::Read).await else {
            return Ok(None);
        };
        let place = match self.look(uri, &storage).await {
            // Nothing is there but a link that is refused, which the listing names.
            Err(error) if error.kind() == StorageErrorKind::Link => return Ok(None),
            place => place?,
        };
        let folder = place.listing().root();
        let matches = self.formats.recognize(&folder);
        let Some(best) = matches.first().filter(|best| best.found.is_checkpoint()) else {
            return Ok(None);
        };
        let info = best.format.info();
        let parts = best.format.target().map_or(&[][..], CheckpointTarget::parts);
        let other = self.formats.occupants(&folder).into_iter().find_map(|(format, occupant)| {
            let is_other = format.name != info.name && !parts.contains(&format.name);
            match occupant {
                Occupant::Checkpoint(what) if is_other => Some(what),
                _ => None,
            }
        });
        Ok(other.map(|what| {
            format!("{uri:?} has two checkpoints; opening the one of {}: {what}", info.title)
        }))
    }

    /// Rewrites the index of the checkpoint at a URL for another program or version, not its data.
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_jobs::Opener) -> Result<(), dcp_jobs::Error> {
    /// let torch = dcp_formats::metadata::ProfileChoice::Torch;
    /// let rewritten = opener.rewrite_metadata("run/step1000", torch, false).await?;
    /// println!("changed: {}", rewritten.changed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// When there is no index that could be rewritten, or it cannot be replaced.
    pub async fn rewrite_metadata(
        &self,
        uri: &str,
        choice: ProfileChoice,
        dry_run: bool,
    ) -> Result<MetadataRewrite, Error> {
        // Opened for writing, a directory that is not there would be made.
        let open = async |uri: &str, access| {
            self.storages.open(uri, access).await.map_err(|error| cannot_open(uri, error))
        };
        let storage = open(uri, Access::Read).await?;
        let place = self.find(uri, &storage, &mut Notes::unheard()).await?.uri;
        let storage = open(&place, if dry_run { Access::Read } else { Access::Write }).await?;
        if let Some(problem) = self.frameworks.half_replaced(&storage).await? {
            let message = format!("{place:?}: {problem}");
            return Err(Error::new(ErrorKind::Unfinished, message));
        }
        let rewritten = crate::write::rewrite_metadata(&storage, choice, dry_run).await;
        rewritten.map_err(|error| Error::from(error).context(format!("cannot rewrite {uri:?}")))
    }

    /// Refuses a rank that stores nothing of its own, and, where all of the checkpoint is needed,
    /// ranks that differ without the choice of one.
    fn settle_ranks(&self, uri: &str, differing: &[RankDifference]) -> Result<(), Error> {
        match self.rank {
            Some(_) if differing.is_empty() => {
                let message =
                    format!("`Opener::rank` is for ranks that differ, and those of {uri:?} do not");
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"))
            }
            Some(rank) if !differing.iter().any(|one| one.ranks.contains(&rank)) => {
                let message =
                    format!("rank {rank} has nothing in {uri:?} that differs among ranks");
                let ranks: BTreeSet<_> =
                    differing.iter().flat_map(|one| one.ranks.iter().copied()).collect();
                let names: Vec<Arc<str>> =
                    ranks.iter().map(|rank| rank.to_string().into()).collect();
                Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint(format!("ranks that have: {}", list(&names))))
            }
            None if !differing.is_empty() && self.need == Need::Whole => {
                let names: Vec<_> = differing.iter().map(|one| Arc::clone(&one.fqn)).collect();
                let message = format!(
                    "{uri:?}: the ranks saved without collectives and differ in {}",
                    list(&names)
                );
                Err(Error::new(ErrorKind::Undecided, message)
                    .with_hint("`Opener::rank` takes what rank N has"))
            }
            _ => Ok(()),
        }
    }

    /// Opens a variant of the model in a folder: of the first format that has it.
    async fn open_variant(
        &self,
        uri: &str,
        place: &Place,
        variant: &str,
    ) -> Result<(FormatInfo, OpenedCheckpoint), Error> {
        let options = self.options().with_variant(Some(variant.to_owned()));
        let mut missing = None;
        for format in self.formats.formats().iter().filter(|one| one.info().model_folders) {
            match format.open(place, &options).await {
                Ok(opened) => return Ok((format.info(), opened)),
                Err(error) if is_missing(&error) => missing = missing.or(Some(error)),
                Err(error) => return Err(cannot_read(uri, error)),
            }
        }
        let problem = missing.map_or_else(String::new, |error| format!(": {error}"));
        Err(Error::new(ErrorKind::InvalidOption, format!("{uri:?}{problem}"))
            .with_hint("leave `Opener::variant` out to read the main files"))
    }

    /// The storage and key of a URI that names a file.
    pub(crate) async fn file(&self, uri: &str) -> Option<(Arc<dyn Storage>, Key)> {
        let (parent, name) = split(uri)?;
        let storage = self.storages.open(&parent, Access::Read).await.ok()?;
        let key = Key::new(name).ok()?;
        storage.stat(&key).await.ok()?;
        Some((storage, key))
    }

    async fn open_file(
        &self,
        uri: &str,
        storage: &Arc<dyn Storage>,
        key: Key,
    ) -> Result<(FormatInfo, OpenedCheckpoint), Error> {
        let name = key.file_name();
        if name.ends_with(".distcp") || name.ends_with(".metadata") {
            let (parent, _) = split(uri).unwrap_or_default();
            let message = format!("{uri:?} is one file of a checkpoint");
            return Err(Error::new(ErrorKind::NotACheckpoint, message)
                .with_hint(format!("pass the directory: {parent}")));
        }
        let opened = async {
            let format = self.formats.recognize_file(storage, &key).await?;
            let found = format.open(&Place::file_of(storage, key), &self.options()).await?;
            Ok((format.info(), found))
        };
        opened.await.map_err(|error| match error {
            CheckpointError::NotACheckpoint { .. } => {
                let message = format!("{uri:?} is a file, but no checkpoint");
                Error::new(ErrorKind::NotACheckpoint, message).with_hint(
                    "a checkpoint is a directory with a .metadata, or a file of torch.save or \
                     safetensors",
                )
            }
            error => cannot_read(uri, error),
        })
    }
}

/// The folder of a run that is opened; a note says which one it is.
fn selected(uri: &str, selection: &RunSelection, notes: &mut Notes) -> Result<String, Error> {
    match &selection.folder {
        Ok(folder) => {
            let (description, reason) = (selection.description, &selection.reason);
            notes.say(format!("{uri:?} {description}; opening {folder}, {reason}"));
            Ok(folder.clone())
        }
        Err(problem) => {
            let message = format!("no checkpoint of the run {uri:?} is complete: {problem}");
            Err(Error::new(ErrorKind::Unfinished, message)
                .with_hint("`Opener::list` says of every checkpoint what is missing"))
        }
    }
}

/// The note where the remains of a save are read.
pub(crate) fn read_all_the_same(unfinished: &UnfinishedSave) -> String {
    format!("the folder {}; this is read as a checkpoint of PyTorch", unfinished.description)
}

/// Notes which files of a model are not read because they hold it in another form.
fn note_variants(variants: &[Key], notes: &mut Notes) {
    if let Some(first) = variants.first() {
        let more = match variants.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        notes.say(format!("not reading {first:?}{more}; `Opener::variant` reads a variant"));
    }
}

/// Whether there is no checkpoint, rather than a bad one.
fn is_missing(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::NotACheckpoint { .. } => true,
        CheckpointError::Storage(error) => error.kind() == StorageErrorKind::NotFound,
        _ => false,
    }
}

pub(crate) fn cannot_open(uri: &str, error: StorageError) -> Error {
    match error.kind() {
        StorageErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, format!("there is nothing at {uri:?}"))
        }
        StorageErrorKind::Unsupported => {
            Error::new(ErrorKind::Unsupported, format!("cannot open {uri:?}")).because(error)
        }
        _ if local_path(uri).is_some_and(|path| path.exists() && !path.is_dir()) => {
            let is_file = local_path(uri).is_some_and(Path::is_file);
            let what = if is_file { "a file" } else { "a device, a pipe or a socket" };
            let message = format!("{uri:?} is {what}, and a directory is needed");
            Error::new(ErrorKind::InvalidPlace, message)
        }
        _ => Error::new(ErrorKind::Io, format!("cannot open {uri:?}")).because(error),
    }
}
