//! From a URL to a checkpoint to read.

use std::path::Path;
use std::sync::Arc;

use dcp_convert::{MetadataRewrite, ProfileChoice, RunListing, Source};
use dcp_core::format::FormatRegistry;
use dcp_core::{Access, CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::detect::{Detected, Detection, detect};
use dcp_megatron::{HALF_REPLACED, MegatronCheckpoint, OpenOptions, recovered};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::notes::Notes;
use crate::opener::{Need, Opener};
use crate::recognize::{
    IncompleteSave, Place, is_dcp, is_megatron, model_file, place, untracked_iteration,
};
use crate::text::list;
use crate::torch_folder;
use crate::uri::{below, split};

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
        let opened = self.open_noting(uri, &mut notes).await?;
        Ok(Checkpoint { notes: notes.into_said(), ..opened })
    }

    async fn open_noting(&self, uri: &str, notes: &mut Notes) -> Result<Checkpoint, Error> {
        let opened = |place: String, storage: &Arc<dyn Storage>, source, megatron| Checkpoint {
            opener: self.clone(),
            uri: uri.to_owned(),
            place,
            source,
            storage: Arc::clone(storage),
            is_folder: true,
            megatron,
            unfinished: None,
            tracker_problem: None,
            notes: Vec::new(),
        };
        let storage = match self.storages.open(uri, Access::Read) {
            Ok(storage) => storage,
            Err(error) => {
                let Some((storage, key)) = self.file(uri).await else {
                    return Err(cannot_open(uri, error));
                };
                let source = self.open_file(uri, Arc::clone(&storage), key).await?;
                if let Some(save) = source.save_reader() {
                    save.notes().await?.iter().for_each(|note| notes.say(note.to_string()));
                }
                let opened = opened(uri.to_owned(), &storage, source, None);
                return Ok(Checkpoint { is_folder: false, ..opened });
            }
        };
        let Place { uri: place, note, tracker_problem } = place(uri, &storage).await?;
        if let Some(note) = note {
            notes.say(note);
        }
        let stored =
            if place == uri { storage } else { self.storages.open(&place, Access::Read)? };
        let storage = recovered(&stored).await?;
        if !Arc::ptr_eq(&storage, &stored) {
            notes.say(HALF_REPLACED);
        }
        if let Some(checkpoint) = self.open_megatron(&place, &storage).await? {
            for warning in checkpoint.damage().iter().chain(checkpoint.warnings()) {
                notes.say(warning);
            }
            let opened = opened(place, &storage, checkpoint.source().clone(), Some(checkpoint));
            return Ok(Checkpoint { tracker_problem, ..opened });
        }
        if let Some(variant) = &self.variant {
            let source = self.open_variant(&place, &storage, variant).await?;
            return Ok(opened(place, &storage, source, None));
        }
        match self.open_folder(&storage).await {
            Ok(source) => {
                self.settle_ranks(uri, &source, notes).await?;
                note_variants(&source.variants().await?, notes);
                let mut opened = opened(place, &storage, source, None);
                opened.unfinished = IncompleteSave::find(&*storage, &opened.source).await?;
                if let Some(unfinished) = &opened.unfinished {
                    notes.say(unfinished.note());
                }
                Ok(opened)
            }
            Err(error) if is_missing(&error) => {
                if let Ok(Some(last)) = untracked_iteration(uri, &storage).await {
                    notes.say(last.note);
                    let place = below(uri, &last.folder);
                    let opened = Box::pin(self.open_noting(&place, notes)).await?;
                    return Ok(Checkpoint { uri: uri.to_owned(), ..opened });
                }
                let tolerant = self.need.tolerant();
                if let Some(source) = torch_folder::open(&storage, None, tolerant).await? {
                    return Ok(opened(place, &storage, source, None));
                }
                match detect(&storage).await {
                    Ok(detection) => {
                        Err(no_checkpoint(uri, &storage, &self.formats, &detection, error).await)
                    }
                    Err(_) => Err(error.into()),
                }
            }
            Err(error) => {
                if let (Need::Whole, None, CheckpointError::Format(_)) =
                    (self.need, self.rank, &error)
                {
                    // Tensors of ranks that differ in dtype or shape need a choice, too.
                    let tolerant = Source::dcp(Arc::clone(&storage), true);
                    if tolerant.metadata().await.is_ok() {
                        self.settle_ranks(uri, &tolerant, &mut Notes::unheard()).await?;
                    }
                }
                Err(cannot_read(uri, error))
            }
        }
    }

    /// Lists the checkpoints in the folder of a run.
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_checkpoint::Opener) -> Result<(), dcp_checkpoint::Error> {
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
        let storage = self.storages.open(uri, Access::Read);
        let storage = storage.map_err(|error| cannot_open(uri, error))?;
        Ok(dcp_convert::list_run(&storage, &self.formats).await?)
    }

    /// What to say of a folder that is two checkpoints at once: which of them is opened.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn ambiguity(&self, uri: &str) -> Result<Option<String>, Error> {
        let Ok(storage) = self.storages.open(uri, Access::Read) else {
            return Ok(None);
        };
        if is_dcp(&*storage).await?
            && let Some(key) = model_file(&*storage).await?
        {
            return Ok(Some(format!(
                "{uri:?} has two checkpoints; opening the one of PyTorch's format, not the one of {:?}",
                key.as_str()
            )));
        }
        Ok(None)
    }

    /// Rewrites the index of the checkpoint at a URL for another program or version, not its data.
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_checkpoint::Opener) -> Result<(), dcp_checkpoint::Error> {
    /// let torch = dcp_convert::ProfileChoice::Torch;
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
        let open = |uri: &str, access| {
            self.storages.open(uri, access).map_err(|error| cannot_open(uri, error))
        };
        let storage = open(uri, Access::Read)?;
        let place = place(uri, &storage).await?.uri;
        let storage = open(&place, if dry_run { Access::Read } else { Access::Write })?;
        if !Arc::ptr_eq(&recovered(&storage).await?, &storage) {
            let message = format!("{place:?}: {HALF_REPLACED}");
            return Err(Error::new(ErrorKind::Unfinished, message));
        }
        let rewritten = dcp_convert::rewrite_metadata(&storage, choice, dry_run).await;
        rewritten.map_err(|error| Error::from(error).context(format!("cannot rewrite {uri:?}")))
    }

    /// Opens the checkpoint in a folder, with what the chosen rank has.
    async fn open_folder(&self, storage: &Arc<dyn Storage>) -> Result<Source, CheckpointError> {
        let tolerant = self.need.tolerant();
        let Some(rank) = self.rank else { return Source::open(storage, tolerant).await };
        let source = Source::dcp_of_rank(Arc::clone(storage), tolerant, rank);
        source.metadata().await?;
        Ok(source)
    }

    /// Notes what is odd about ranks that saved without collectives. Where they differ, all of it
    /// cannot be had without the choice of a rank.
    async fn settle_ranks(
        &self,
        uri: &str,
        source: &Source,
        notes: &mut Notes,
    ) -> Result<(), Error> {
        let Some(reader) = source.dcp_reader() else { return Ok(()) };
        let differing = reader.differing().await?;
        match self.rank {
            Some(_) if differing.is_empty() => {
                let message =
                    format!("--rank is for ranks that differ, and those of {uri:?} do not");
                return Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"));
            }
            Some(rank) if !differing.iter().any(|one| one.ranks().contains(&rank)) => {
                let message =
                    format!("rank {rank} has nothing in {uri:?} that differs among ranks");
                let mut ranks: Vec<_> = differing.iter().flat_map(|one| one.ranks()).collect();
                ranks.sort_unstable();
                ranks.dedup();
                let names: Vec<Arc<str>> =
                    ranks.iter().map(|rank| rank.to_string().into()).collect();
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint(format!("ranks that have: {}", list(&names))));
            }
            None if !differing.is_empty() && self.need == Need::Whole => {
                let names: Vec<_> = differing.iter().map(|one| Arc::clone(&one.fqn)).collect();
                let message = format!(
                    "{uri:?}: the ranks saved without collectives and differ in {}",
                    list(&names)
                );
                return Err(Error::new(ErrorKind::Undecided, message)
                    .with_hint("--rank N takes what rank N has"));
            }
            _ => {}
        }
        for warning in &*reader.rank_warnings().await? {
            notes.say(warning.to_string());
        }
        if self.rank.is_none() && !differing.is_empty() {
            notes.say("--rank N shows what another rank has");
        }
        Ok(())
    }

    /// Opens a variant of the model in a folder.
    async fn open_variant(
        &self,
        uri: &str,
        storage: &Arc<dyn Storage>,
        variant: &str,
    ) -> Result<Source, Error> {
        let tolerant = self.need.tolerant();
        let source = Source::hf_with(Arc::clone(storage), |reader| {
            reader.variant(variant).tolerant(tolerant)
        });
        match source.metadata().await {
            Ok(_) => Ok(source),
            Err(error) if is_missing(&error) => {
                match torch_folder::open(storage, Some(variant), tolerant).await? {
                    Some(source) => Ok(source),
                    None => {
                        let message = format!("{uri:?}: {error}");
                        Err(Error::new(ErrorKind::InvalidOption, message)
                            .with_hint("leave --variant out to read the main files"))
                    }
                }
            }
            Err(error) => Err(cannot_read(uri, error)),
        }
    }

    /// Opens the checkpoint of Megatron-Core in a folder; `None` where there is none.
    async fn open_megatron(
        &self,
        uri: &str,
        storage: &Arc<dyn Storage>,
    ) -> Result<Option<MegatronCheckpoint>, Error> {
        if !is_megatron(&**storage).await? {
            return Ok(None);
        }
        let options = OpenOptions::default().with_tolerant(self.need.tolerant());
        match MegatronCheckpoint::open(storage, &options).await {
            Ok(checkpoint) => Ok(Some(checkpoint)),
            Err(error) => Err(cannot_read(uri, error)),
        }
    }

    /// The storage and key of a URI that names a file.
    async fn file(&self, uri: &str) -> Option<(Arc<dyn Storage>, Key)> {
        let (parent, name) = split(uri)?;
        let storage = self.storages.open(&parent, Access::Read).ok()?;
        let key = Key::new(name).ok()?;
        storage.stat(&key).await.ok()?;
        Some((storage, key))
    }

    async fn open_file(
        &self,
        uri: &str,
        storage: Arc<dyn Storage>,
        key: Key,
    ) -> Result<Source, Error> {
        let name = key.file_name();
        if name.ends_with(".distcp") || name.ends_with(".metadata") {
            let (parent, _) = split(uri).unwrap_or_default();
            let message = format!("{uri:?} is one file of a checkpoint");
            return Err(Error::new(ErrorKind::NotACheckpoint, message)
                .with_hint(format!("pass the directory: {parent}")));
        }
        let opened = Source::open_file(&storage, key, self.need.tolerant()).await;
        opened.map_err(|error| match error {
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

/// Notes which files of a model are not read because they hold it in another form.
fn note_variants(variants: &[Key], notes: &mut Notes) {
    if let Some(first) = variants.first() {
        let more = match variants.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        notes.say(format!("not reading {first:?}{more}; --variant NAME reads a variant"));
    }
}

fn cannot_read(uri: &str, error: impl Into<Error>) -> Error {
    error.into().context(format!("cannot read {uri:?}")).without_hint()
}

/// Whether there is no checkpoint, rather than a bad one.
fn is_missing(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::NotACheckpoint { .. } => true,
        CheckpointError::Storage(error) => error.kind() == StorageErrorKind::NotFound,
        _ => false,
    }
}

fn cannot_open(uri: &str, error: StorageError) -> Error {
    match error.kind() {
        StorageErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, format!("there is nothing at {uri:?}"))
        }
        StorageErrorKind::Unsupported => Error::new(ErrorKind::Unsupported, error.to_string()),
        _ if Path::new(uri).is_file() => {
            let message = format!("{uri:?} is a file, and a directory is needed");
            Error::new(ErrorKind::InvalidPlace, message)
        }
        _ => Error::new(ErrorKind::Io, format!("cannot open {uri:?}")).because(error),
    }
}

/// Explains why a directory is no checkpoint, and names one that is near.
async fn no_checkpoint(
    uri: &str,
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    detection: &Detection,
    error: CheckpointError,
) -> Error {
    let failure = match &detection.kind {
        Detected::Dcp | Detected::DcpRankLocal { .. } => return Error::from(error),
        Detected::Empty => {
            Error::new(ErrorKind::NotACheckpoint, format!("{uri:?} is an empty directory"))
        }
        kind => {
            let mut message = format!("{uri:?} is no checkpoint: the directory {kind}");
            for also in &detection.also {
                message.push_str(&format!("; it also {also}"));
            }
            Error::new(ErrorKind::NotACheckpoint, message)
        }
    };
    let below = |key: &Key| match uri.trim_end_matches('/') {
        "." => key.to_string(),
        base => format!("{base}/{key}"),
    };
    match &*detection.checkpoints {
        [] => failure,
        [one] => failure.with_hint(format!("there is a checkpoint below it: {}", below(one))),
        [.., last] => {
            let latest =
                dcp_convert::list_run(storage, formats).await.ok().and_then(|run| run.latest);
            let latest = latest.and_then(|name| Key::new(name).ok());
            failure.with_hint(match latest {
                Some(name) => format!(
                    "the latest complete checkpoint below it is {}; `dcp ls` lists all",
                    below(&name)
                ),
                None => format!(
                    "there are {} checkpoints below it, such as {}; `dcp ls` lists all",
                    detection.checkpoints.len(),
                    below(last)
                ),
            })
        }
    }
}
