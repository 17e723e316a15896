//! Options that say which keys are taken, and under which names.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dcp::convert::{
    JobOptions, Rename, Selection, Source, StatePart, UnmatchedPattern, parse_mapping,
};
use dcp::olmo::{OptimizerLayout, source_with_layout};
use dcp::planner::KeyFilter;

use crate::failure::{Exit, Failure};
use crate::output::Output;

/// Which keys are taken, and under which names.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Keys")]
pub(crate) struct KeyOptions {
    /// Take only keys that match, or lie below this name; may be given again for more.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,

    /// Leave out keys that match, or lie below this name; may be given again.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,

    /// Take only the model, without the name of the dict that it lies in.
    #[arg(long)]
    pub(crate) model_only: bool,

    /// Leave out the optimizer.
    #[arg(long, conflicts_with = "model_only")]
    pub(crate) no_optimizer: bool,

    /// Take everything, also where the format usually gets the model alone.
    #[arg(long, conflicts_with_all = ["model_only", "no_optimizer"])]
    pub(crate) everything: bool,

    /// Rename keys as sed does: s/PATTERN/REPLACEMENT/ or with g at the end; may be given again.
    #[arg(long, value_name = "SUBSTITUTION", value_parser = parse_rename)]
    pub(crate) rename: Vec<Rename>,

    /// Rename keys by a file: a JSON object, or lines of an old and a new name (- to leave out).
    #[arg(long, value_name = "FILE")]
    pub(crate) map: Option<PathBuf>,
}

/// How the optimizer's state is divided into keys.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Keys")]
pub(crate) struct OptimizerKeys {
    /// Divide the optimizer's state as OLMo-core does: nested as in PyTorch, or by parameter.
    #[arg(long, value_name = "LAYOUT")]
    optimizer_layout: Option<Layout>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Layout {
    /// state.FQN.field, and a list of param_groups.
    Nested,
    /// Settings for every parameter, flatten_optimizer_state=True.
    Flat,
}

impl OptimizerKeys {
    /// The checkpoint with its optimizer, if there is one, in the layout that was asked for.
    pub(crate) async fn apply(
        self,
        source: Source,
        options: &JobOptions,
    ) -> Result<Source, Failure> {
        let layout = match self.optimizer_layout {
            None => return Ok(source),
            Some(Layout::Nested) => OptimizerLayout::Nested,
            Some(Layout::Flat) => OptimizerLayout::Flat,
        };
        Ok(source_with_layout(&source, layout, options).await?)
    }
}

/// The keys of a source that `selection` takes, by the names that they have in it.
pub(crate) async fn taken_of(
    selection: &Selection,
    source: &Source,
) -> Result<HashSet<Arc<str>>, Failure> {
    let metadata = source.metadata().await?;
    let chosen = selection.of(&metadata)?;
    let names = chosen.iter().filter_map(|key| metadata.at(key.entry));
    Ok(names.map(|(fqn, _)| Arc::clone(fqn)).collect())
}

/// Patterns of `selection` that match no key of any of the sources.
pub(crate) async fn unmatched_in(
    selection: &Selection,
    sources: impl IntoIterator<Item = &Source>,
) -> Result<Vec<UnmatchedPattern>, Failure> {
    let mut unmatched: Option<Vec<UnmatchedPattern>> = None;
    for source in sources {
        let more = selection.unmatched(&*source.metadata().await?)?;
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

pub(crate) fn parse_rename(text: &str) -> Result<Rename, String> {
    Rename::parse(text).map_err(|error| error.to_string())
}

impl KeyOptions {
    /// The selection; `usual` is the part of a training state that is taken when none was named.
    pub(crate) fn selection(&self, usual: StatePart) -> Result<Selection, Failure> {
        let mut selection = Selection::all().of_part(match () {
            () if self.model_only => StatePart::Model,
            () if self.no_optimizer => StatePart::WithoutOptimizer,
            () if self.everything || self.names_keys() => StatePart::Everything,
            () => usual,
        });
        if !self.include.is_empty() {
            selection = selection.including(KeyFilter::any_of(&self.include));
        }
        if !self.exclude.is_empty() {
            selection = selection.excluding(KeyFilter::any_of(&self.exclude));
        }
        if let Some(file) = &self.map {
            let text = std::fs::read_to_string(file).map_err(|error| {
                Failure::new(Exit::Io, error.to_string())
                    .context(format!("cannot read the mapping {:?}", file.display().to_string()))
            })?;
            selection = selection.mapping(parse_mapping(&text)?);
        }
        Ok(self.rename.iter().cloned().fold(selection, Selection::renaming))
    }

    /// What `selection` takes of a source, and how many keys it leaves out because only the model
    /// is usually taken.
    pub(crate) async fn apply(
        &self,
        selection: &Selection,
        source: &Source,
        options: &JobOptions,
        out: &Output,
    ) -> Result<(Source, usize), Failure> {
        let all = source.metadata().await?.len();
        let source = selection.apply(source, options).await?;
        let taken = source.metadata().await?.len();
        if selection.part != StatePart::Model || taken >= all || self.model_only {
            return Ok((source, 0));
        }
        out.note(&format!("taking the model, {taken} of {all} keys; --everything takes all"));
        Ok((source, all - taken))
    }

    /// Whether keys are named one way or another.
    fn names_keys(&self) -> bool {
        !self.include.is_empty() || !self.rename.is_empty() || self.map.is_some()
    }
}
