//! Which keys are written, and under which names.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::format::WantedKeys;
use dcp_core::metadata::Entry;
use dcp_planner::KeyFilter;
use indexmap::IndexMap;

use crate::checkpoint::format::Format;
use crate::checkpoint::notes::Notes;
use crate::error::Error;
use crate::keys::select::Selection;
use crate::keys::{Rename, StatePart, UnmatchedPattern};
use crate::options::JobOptions;
use crate::source::Source;

/// Which keys are written, and under which names; all of them by default.
///
/// Keys are chosen by the names they have; then the map and the renames apply. A pattern is a whole
/// name in which `*` matches any text and `?` one character, or the beginning of names up
/// to a dot.
///
/// ```
/// use dcp_jobs::Keys;
/// use dcp_jobs::keys::Rename;
///
/// let keys = Keys::all().include("ema.*").rename(Rename::parse(r"s/^ema\.//")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Keys {
    include: Vec<String>,
    exclude: Vec<String>,
    part: Option<StatePart>,
    renames: Vec<Rename>,
    map: Option<IndexMap<String, Option<String>>>,
}

impl Keys {
    /// Every key that the target's format usually gets.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// Takes only keys that match this pattern, or one of the earlier ones.
    #[must_use]
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// Leaves out keys that match this pattern.
    #[must_use]
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Takes this part of a training state; by default what the format usually gets, and
    /// everything where keys are [included](Self::include) by name.
    #[must_use]
    pub fn part(mut self, part: impl Into<Option<StatePart>>) -> Self {
        self.part = part.into();
        self
    }

    /// Renames keys.
    #[must_use]
    pub fn rename(mut self, rename: Rename) -> Self {
        self.renames.push(rename);
        self
    }

    /// Renames keys by a table, in which `None` leaves a key out.
    #[must_use]
    pub fn map(mut self, map: IndexMap<String, Option<String>>) -> Self {
        self.map = Some(map);
        self
    }

    /// The selection; `usual` is the part of a training state that is taken when none is chosen.
    pub(crate) fn selection(&self, usual: StatePart) -> Selection {
        let usual = if self.include.is_empty() { usual } else { StatePart::Everything };
        let mut selection = Selection::all().with_part(self.part.unwrap_or(usual));
        if !self.include.is_empty() {
            selection = selection.with_include(KeyFilter::any_of(&self.include));
        }
        if !self.exclude.is_empty() {
            selection = selection.with_exclude(KeyFilter::any_of(&self.exclude));
        }
        if let Some(map) = &self.map {
            selection = selection.with_mapping(map.clone());
        }
        self.renames.iter().cloned().fold(selection, Selection::with_rename)
    }

    /// The keys that a checkpoint is [opened for](crate::Opener::open_keys) to write these in a format;
    /// `None` where those are all.
    #[must_use]
    pub fn needed(&self, format: Format) -> Option<WantedKeys> {
        let selection = self.selection(format.usual_part());
        (!selection.is_everything()).then(|| selection.needed())
    }

    /// Returns the source with the keys that `selection` takes, and how many keys it leaves out because only
    /// the model is usually taken.
    pub(crate) async fn apply(
        &self,
        selection: &Selection,
        source: &Source,
        job: &JobOptions,
        notes: &mut Notes,
    ) -> Result<(Source, usize), Error> {
        // What is excluded by name is not what `StatePart::Everything` takes.
        let everything = selection.clone().with_part(StatePart::Everything);
        let names = source.names().await?;
        let all = everything.of(&names).map_or(names.len(), |chosen| chosen.len());
        let source = selection.apply(source, job).await?;
        let taken = source.metadata().await?.len();
        if selection.part != StatePart::Model || taken >= all || self.part.is_some() {
            return Ok((source, 0));
        }
        // A matrix is what all models have, and states of trainers have none.
        let is_matrix = |entry: &Entry| entry.as_tensor().is_some_and(|one| one.shape.ndim() > 1);
        let of_what = match source.metadata().await?.iter().any(|(_, entry)| is_matrix(entry)) {
            true => "taking the model, ",
            false => "taking what is no state of an optimizer, but no matrix of a model: ",
        };
        notes.say(format!("{of_what}{taken} of {all} keys; `StatePart::Everything` takes all"));
        Ok((source, all - taken))
    }
}

/// The keys of a source that `selection` takes, by the names that they have in it.
pub(crate) async fn taken_of(
    selection: &Selection,
    source: &Source,
) -> Result<HashSet<Arc<str>>, Error> {
    let names = source.names().await?;
    let chosen = selection.of(&names)?;
    let names = chosen.iter().filter_map(|key| names.at(key.entry));
    Ok(names.map(|(fqn, _)| Arc::clone(fqn)).collect())
}

/// Patterns of `selection` that match no key of any of the sources.
pub(crate) async fn unmatched_in(
    selection: &Selection,
    sources: impl IntoIterator<Item = &Source>,
) -> Result<Vec<UnmatchedPattern>, Error> {
    let mut unmatched: Option<Vec<UnmatchedPattern>> = None;
    for source in sources {
        let more = selection.unmatched(&*source.names().await?)?;
        let is_same = |a: &UnmatchedPattern, b: &UnmatchedPattern| {
            (&a.option, &a.pattern) == (&b.option, &b.pattern)
        };
        unmatched = Some(match unmatched {
            None => more,
            Some(mut before) => {
                before.retain(|one| more.iter().any(|other| is_same(one, other)));
                before
            }
        });
    }
    Ok(unmatched.unwrap_or_default())
}
