//! Lists a run: its checkpoints, and what in its folder names them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use dcp_core::error::error_chain;
use dcp_core::format::{Listing, Place};
use dcp_core::storage::{FolderEntry, ObjectMeta};
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::listing::{RunEntry, list_run_without};

use super::lightning::{LIGHTNING_STATE, LightningState};
use super::links::{Links, Special, links};
use super::notes::{Best, Note, Notes};
use super::order::StepOrder;
use super::recorded::{TRAINER_STATE, TrainerState};
use super::sidecar::{Sidecars, names_folder, read_at_most, read_state};
use super::{Run, RunStep, StepNaming};

/// The longest file that names a checkpoint of the run, in bytes.
pub(super) const POINTER_BYTES_MAX: u64 = 64 << 10;
/// The longest text whose numbers may be steps though it is no JSON, in bytes.
const SHORT_BYTES: usize = 256;
/// Files of the run that are read because they may name a checkpoint.
const POINTERS_MAX: usize = 64;

/// A run as it is now.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// The checkpoints, in ascending order of steps.
    pub(super) steps: Vec<Seen>,
    /// Names of files and folders that are no checkpoints of steps.
    pub(super) others: Vec<String>,
    /// The notes of trainers on the best checkpoints.
    pub(super) notes: Notes,
}

/// A checkpoint of a run, and what it needs of others.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) step: RunStep,
    /// The paths of the best checkpoints, as the trainer had noted them by then.
    pub(super) best: Vec<String>,
    /// The folders of other steps that links in its folder lead into.
    pub(super) linked: BTreeSet<String>,
    /// Identifies its files; see [`Sidecars::identity`].
    pub(super) identity: Option<u64>,
    /// The files of the trainer's state; see [`Sidecars::state_files`].
    pub(super) state_files: BTreeSet<String>,
}

impl Run {
    /// The checkpoints, in ascending order of steps, and all else.
    pub(super) async fn look(&self, storage: &Arc<dyn Storage>) -> Result<Look, StorageError> {
        // As `ls` lists it: a link that the reader of a step refuses makes the step unknown.
        let refused = self.opener.refused_links(&self.url).await;
        let listing = list_run_without(storage, &self.opener.formats, &refused).await?;
        let (mut files, mut folders) = (Vec::new(), BTreeSet::new());
        let mut root = storage.list_folder(None);
        while let Some(entry) = root.try_next().await? {
            match entry {
                FolderEntry::Object(meta) => files.push(meta),
                FolderEntry::Folder(key) => {
                    folders.insert(key.file_name().to_owned());
                }
                _ => {}
            }
        }
        let tracked = self.tracked(storage, files.clone()).await?;
        let (mut pointers, unread) = pointers(&**storage, &files).await?;
        let mut links = match storage.capabilities().complete_listing {
            true => Links::default(),
            false => links(&self.url).await?,
        };
        let mut notes =
            Notes { all: notes(&**storage, &files, &folders).await?, ..Notes::default() };
        let noted = |path: &str| notes.all.iter().any(|note| note.file == path);
        let is_of_run = |special: &&Special| {
            let folder = special.path.split_once('/').map_or("", |(folder, _)| folder);
            StepNaming::step_of(folder).is_none() && !noted(&special.path)
        };
        let special: Vec<_> = links.special.iter().filter(is_of_run).map(special_note).collect();
        notes.all.extend(special);
        notes.all.extend(unread);
        for note in &notes.all {
            if let Best::Paths(paths) = &note.best {
                pointers.extend(paths.iter().map(|best| Pointer::file(&note.file, best.clone())));
            }
        }
        pointers.extend(links.run.drain(..).map(Pointer::link));
        pointers.extend(links.texts.drain(..).map(|(name, text)| Pointer::file(&name, text)));
        let (steps_of_run, others): (Vec<_>, Vec<_>) = listing
            .entries
            .into_iter()
            .partition(|entry| !entry.kind.is_file() && folders.contains(&entry.name));
        let all = steps_of_run.iter().chain(&others);
        notes.others = all.map(|entry| (entry.name.clone(), entry.complete)).collect();
        let entries: BTreeMap<_, _> =
            steps_of_run.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        let special = &*links.special;
        let named = folders.iter().filter_map(|name| Some((name, StepNaming::step_of(name)?)));
        let read = named.map(|(name, step)| {
            let entry = entries.get(name);
            let is_tracked = tracked.as_ref() == Some(name);
            let named_by = pointers.iter().filter(|pointer| pointer.names(name, step));
            let mut named_by: Vec<_> = named_by.map(Pointer::clause).collect();
            let leading = links.leading.get(name);
            named_by.extend(leading.map(|link| format!("the link {link:?} leads to it")));
            let outward = links.outward.get(name);
            let linked = links.steps.get(name).cloned().unwrap_or_default();
            let empty = links.empty.get(name).copied();
            async move {
                let mut sidecars =
                    Sidecars::read(&**storage, &Key::new(name)?, step, special).await?;
                if let Some(changed) = empty {
                    sidecars.modified = changed;
                }
                let notes = std::mem::take(&mut sidecars.notes);
                let seen = seen(name, step, entry, sidecars, is_tracked, empty.is_some());
                let seen = seen.map(|mut seen| {
                    seen.best = best_of(&notes);
                    seen.step.named_by = named_by;
                    seen.linked = linked;
                    if let (Some(false), false, Some(link)) =
                        (seen.step.complete, seen.step.deleting, outward)
                    {
                        // What is missing may be behind the link.
                        seen.step.complete = None;
                        seen.step.problem =
                            Some(format!("{link:?} is a link that is not followed"));
                    }
                    seen
                });
                Ok::<_, StorageError>((seen, notes))
            }
        });
        let parallelism = usize::from(storage.capabilities().parallelism.clamp(1, 16));
        let read: Vec<_> = read.collect();
        let found = stream::iter(read).buffer_unordered(parallelism).try_collect::<Vec<_>>();
        let (steps, of_steps): (Vec<_>, Vec<_>) = found.await?.into_iter().unzip();
        notes.all.extend(of_steps.into_iter().flatten());
        let mut steps: Vec<_> = steps.into_iter().flatten().collect();
        steps.sort_by(|a, b| {
            let key = |one: &Seen| (one.step.step, one.step.modified, one.step.name.clone());
            StepOrder::Step.compare(key(a), key(b))
        });
        let is_step = |name: &str| steps.iter().any(|one| one.step.name == name);
        let no_steps = links.steps.iter().filter(|(folder, _)| !is_step(folder));
        let led_to: Vec<_> =
            no_steps.flat_map(|(folder, to)| to.iter().map(move |step| (step, folder))).collect();
        let is_pointer = |name: &str| {
            let is_note = notes.all.iter().any(|note| note.file == name);
            is_note || pointers.iter().any(|pointer| pointer.file == name)
        };
        let files = files.iter().map(|file| file.key.file_name());
        let others = folders.iter().map(String::as_str).filter(|name| !is_step(name));
        let others = others.chain(files.filter(|name| !is_pointer(name)));
        let others = others.map(ToOwned::to_owned).collect();
        for one in &mut steps {
            let folder = led_to.iter().find(|(step, _)| **step == one.step.name);
            let clause = folder.map(|(_, folder)| format!("links in {folder:?} lead into it"));
            one.step.named_by.extend(clause);
        }
        Ok(Look { steps, others, notes })
    }

    /// The folder that the tracker of the run names.
    async fn tracked(
        &self,
        storage: &Arc<dyn Storage>,
        files: Vec<ObjectMeta>,
    ) -> Result<Option<String>, StorageError> {
        let place = Place::folder(storage, Listing::new(files));
        for format in self.opener.formats.formats() {
            if let Some(tracker) = format.tracker(&place).await? {
                return Ok(tracker.folder.ok());
            }
        }
        Ok(None)
    }
}

/// A file in the folder of a run that names a checkpoint: `latest` of DeepSpeed, the tracker of
/// Megatron-LM or veRL, the state of a trainer with its best checkpoint.
#[derive(Debug)]
struct Pointer {
    file: String,
    text: String,
    is_link: bool,
}

impl Pointer {
    fn file(name: &str, text: String) -> Self {
        Self { file: name.to_owned(), text, is_link: false }
    }

    fn link((file, text): (String, String)) -> Self {
        Self { file, text, is_link: true }
    }

    /// Whether it names the folder of this name, or its step as a number: `10`, or `{"step": 10}`. A long text
    /// that is no JSON, such as a log, has numbers of other kinds.
    fn names(&self, name: &str, step: u64) -> bool {
        let text = self.text.trim();
        let has_numbers = !self.is_link && (text.len() <= SHORT_BYTES || text.starts_with('{'));
        let is_part = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '=');
        let is_step =
            |word: &str| word.bytes().all(|b| b.is_ascii_digit()) && word.parse() == Ok(step);
        has_numbers && text.split(|c| !is_part(c)).any(is_step) || names_folder(text, name)
    }

    fn clause(&self) -> String {
        match &*self.file {
            TRAINER_STATE => format!("{TRAINER_STATE} of the run names it as the best"),
            link if self.is_link => format!("the link {link:?} leads to it"),
            file => format!("{file:?} names it"),
        }
    }
}

/// Whether a file, a link or a folder of that name may name a checkpoint of the run: `latest`, `BEST`, `.best`.
pub(crate) fn is_pointer(name: &str) -> bool {
    let name = name.strip_prefix('.').unwrap_or(name).to_ascii_lowercase();
    ["latest", "last", "best"].iter().any(|word| name.starts_with(word))
}

/// Whether a file of that name is text that may name a checkpoint: `latest`, `best.json`, but not the weights
/// `best_model.pt` or the log `latest.log`.
pub(super) fn is_text(name: &str) -> bool {
    const ENDINGS: [&str; 5] = ["json", "txt", "yaml", "yml", "toml"];
    let name = name.strip_prefix('.').unwrap_or(name);
    name.rsplit_once('.').is_none_or(|(_, ending)| {
        let is_number = !ending.is_empty() && ending.bytes().all(|byte| byte.is_ascii_digit());
        is_number || ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known))
    })
}

/// The files of a run that may name a checkpoint, and a note of each that cannot be read and may name any. Small
/// files of other names are read as well, and are ignored where they are no text.
async fn pointers(
    storage: &dyn Storage,
    files: &[ObjectMeta],
) -> Result<(Vec<Pointer>, Vec<Note>), StorageError> {
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    let mut note = |file: &ObjectMeta, problem: String| {
        let (file, best) = (file.key.to_string(), Best::Unclear(problem));
        unread.push(Note { file, of_step: None, step: None, written: None, best });
    };
    let named = files.iter().filter(|file| is_pointer(file.key.file_name()));
    let (texts, others): (Vec<_>, Vec<_>) = named.partition(|file| is_text(file.key.file_name()));
    let count = texts.len();
    if let Some(file) = texts.get(POINTERS_MAX) {
        note(file, format!("is one of {count} such files, of which dcp reads {POINTERS_MAX}"));
    }
    let others = others.into_iter().filter(|file| file.byte_len <= POINTER_BYTES_MAX);
    for file in texts.into_iter().chain(others).take(POINTERS_MAX) {
        if file.byte_len > POINTER_BYTES_MAX {
            let (len, max) = (file.byte_len, POINTER_BYTES_MAX >> 10);
            note(file, format!("is {len} bytes long, and dcp reads at most {max} KiB"));
            continue;
        }
        let Some(text) = read_at_most(storage, Some(file.clone()), POINTER_BYTES_MAX).await? else {
            continue;
        };
        match String::from_utf8(text) {
            Ok(text) => found.push(Pointer::file(file.key.file_name(), text)),
            Err(_) if is_text(file.key.file_name()) => {
                note(file, "is no text in UTF-8".to_owned());
            }
            Err(_) => {}
        }
    }
    Ok((found, unread))
}

/// Whether a file or folder of that name is the last checkpoint of Lightning.
pub(super) fn is_last(name: &str) -> bool {
    name.starts_with("last") && name.ends_with(".ckpt")
}

/// The notes of trainers that belong to no step: the state of the trainer of transformers in the folder of
/// the run, and that of Lightning in `last.ckpt` and in folders such as `best`.
async fn notes(
    storage: &dyn Storage,
    files: &[ObjectMeta],
    folders: &BTreeSet<String>,
) -> Result<Vec<Note>, StorageError> {
    let mut found = Vec::new();
    let note = |file: &ObjectMeta, step, best| {
        let (file, written) = (file.key.to_string(), file.modified);
        Note { file, of_step: None, step, written, best }
    };
    if let Some(file) = files.iter().find(|file| file.key.file_name() == TRAINER_STATE) {
        let read = |json: Vec<u8>| TrainerState::parse(&json, None);
        found.push(match read_state(storage, file, read).await? {
            Ok(state) => note(file, state.step, state.best_checkpoint.into_best()),
            Err(problem) => note(file, None, Best::Unclear(problem)),
        });
    }
    let mut states: Vec<_> =
        files.iter().filter(|file| is_last(file.key.file_name())).cloned().collect();
    let others =
        folders.iter().filter(|name| is_pointer(name) && StepNaming::step_of(name).is_none());
    for name in others {
        let key = Key::new(format!("{name}/{LIGHTNING_STATE}"))?;
        match storage.stat(&key).await {
            Ok(meta) => states.push(meta),
            Err(error) if error.kind() == StorageErrorKind::NotFound => {}
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => {
                let problem = format!("cannot be read: {}", error_chain(&error));
                found.push(note(&ObjectMeta::new(key, 0), None, Best::Unclear(problem)));
            }
        }
    }
    for (at, file) in states.iter().enumerate() {
        if at >= POINTERS_MAX {
            let count = states.len();
            let problem =
                format!("is one of {count} such files, of which dcp reads {POINTERS_MAX}");
            found.push(note(file, None, Best::Unclear(problem)));
            break;
        }
        let name = file.key.as_str().split('/').next().unwrap_or_default();
        let read = |state| LightningState::parse(state, name);
        found.push(match read_state(storage, file, read).await? {
            Ok(state) => note(file, state.step, state.best),
            Err(problem) => note(file, None, Best::Unclear(problem)),
        });
    }
    Ok(found)
}

/// The note of an entry that is no regular file, whose content is unknown.
fn special_note(Special { path, what }: &Special) -> Note {
    let best = Best::Unclear((*what).to_owned());
    Note { file: path.clone(), of_step: None, step: None, written: None, best }
}

/// The paths in the notes of one step.
fn best_of(notes: &[Note]) -> Vec<String> {
    let paths = notes.iter().filter_map(|note| match &note.best {
        Best::Paths(paths) => Some(paths.iter().cloned()),
        Best::Unclear(_) => None,
    });
    paths.flatten().collect()
}

/// A folder with the name of a step; `None` where it is neither a checkpoint nor the rest of one.
fn seen(
    name: &str,
    step: u64,
    entry: Option<&RunEntry>,
    sidecars: Sidecars,
    tracked: bool,
    is_empty: bool,
) -> Option<Seen> {
    let Sidecars { pinned, deleting, saved_again, metrics, modified, identity, .. } = sidecars;
    let mut complete = match entry {
        Some(entry) => entry.complete,
        None => Some(false),
    };
    let mut strays = entry.map(|entry| entry.strays.clone()).unwrap_or_default();
    let deleting = deleting.is_some_and(|mark| {
        let is_spared =
            entry.is_some_and(|entry| complete != Some(false) && mark.spares(entry.kind.format()));
        !(is_spared || saved_again && entry.is_some())
    });
    if entry.is_none() && !deleting && !is_empty {
        return None;
    }
    let mut problem = entry.and_then(|entry| entry.problem.clone());
    let is_complete = complete == Some(true) || !strays.is_empty();
    if is_complete && StepNaming::is_temporary(name) {
        complete = Some(false);
        problem = Some("it was never renamed to its final name".to_owned());
        strays.clear();
    } else if let (true, Some(unreadable)) = (is_complete, sidecars.unreadable_state) {
        complete = None;
        problem = Some(unreadable);
        strays.clear();
    }
    if deleting {
        strays.clear();
        complete = Some(false);
        problem = Some("its deletion did not end".to_owned());
    } else if is_empty {
        problem = Some("it has no files".to_owned());
    }
    let modified = modified.and_then(|time| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs()));
    let step = RunStep {
        name: name.to_owned(),
        step,
        checkpoint: entry.and_then(|entry| entry.checkpoint.clone()),
        format: entry.map_or("", |entry| entry.kind.format()),
        complete,
        problem,
        strays,
        files: entry.map_or(0, |entry| entry.files),
        bytes: entry.map_or(0, |entry| entry.bytes),
        modified,
        metrics,
        pinned,
        tracked,
        named_by: Vec::new(),
        deleting,
    };
    let state_files = sidecars.state_files;
    Some(Seen { step, best: Vec::new(), linked: BTreeSet::new(), identity, state_files })
}
