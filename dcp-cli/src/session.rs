//! The state that all commands of one run share: input options, output, rollback.

use dcp::StorageRegistry;
use dcp::cache::{CacheFolder, cache_layer};
use dcp::core::format::WantedKeys;
use dcp::jobs::JobOptions;
use dcp::jobs::group::JobGroup;
use dcp::jobs::{Checkpoint, Need, Opener, Rollback};
use dcp::trace::TraceRecorder;

use crate::failure::{Exit, Failure};
use crate::interrupt;
use crate::options::Global;
use crate::output::Output;
use crate::plugins::Plugins;
use crate::ranks::Ranks;

/// One run of the program.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) out: Output,
    /// Removes what the command has created so far.
    pub(crate) rollback: Rollback,
    /// Whether links out of a checkpoint are followed.
    pub(crate) follow_links: bool,
    opener: Opener,
    storages: StorageRegistry,
    /// The processes that share the command.
    group: Option<JobGroup>,
}

impl Session {
    /// A run whose requests to storages are recorded, if there is a recorder.
    pub(crate) fn new(
        global: Global,
        recorder: Option<&TraceRecorder>,
        plugins: &Plugins,
        ranks: Option<&Ranks>,
    ) -> Result<Self, Failure> {
        let mut storages = storages(&global, plugins);
        let known = storages.check_options();
        known.map_err(|error| Failure::from(error).instead_of(Exit::Io, Exit::Usage))?;
        if let Some(recorder) = recorder {
            storages = storages.layer(recorder.layer(ranks.map_or(0, Ranks::rank)));
        }
        if let Some(folder) = &global.cache_dir {
            let folder = CacheFolder::new(folder).max_bytes(global.cache_size).open()?;
            storages = storages.layer(cache_layer(folder));
        }
        let opener = dcp::opener(storages.clone())
            .formats(plugins.formats())
            .frameworks(plugins.frameworks())
            .rank(global.rank)
            .variant(global.variant.clone());
        let out = Output::new(global.color, global.quiet)
            .mute(ranks.is_some_and(|ranks| !ranks.is_coordinator()));
        Ok(Self {
            out,
            rollback: Rollback::new(),
            follow_links: global.follow_links,
            opener,
            storages,
            group: ranks.and_then(Ranks::of_jobs),
        })
    }

    /// `options` of a job that the processes of the command share.
    pub(crate) fn shared(&self, options: JobOptions) -> JobOptions {
        options.with_group(self.group.clone())
    }

    /// Whether this process prints, commits and reports.
    pub(crate) fn is_coordinator(&self) -> bool {
        self.group.as_ref().is_none_or(JobGroup::is_coordinator)
    }

    /// The storages of URLs.
    pub(crate) fn storages(&self) -> &StorageRegistry {
        &self.storages
    }

    /// Opens checkpoints as the input options say; notes go to stderr.
    pub(crate) fn opener(&self) -> Opener {
        let out = self.out;
        self.opener.clone().on_note(move |note| out.note(note))
    }

    /// The same without notes.
    pub(crate) fn silent_opener(&self) -> Opener {
        self.opener.clone()
    }

    /// Opens a checkpoint to read.
    pub(crate) async fn open(&self, uri: &str, need: Need) -> Result<Checkpoint, Failure> {
        Ok(self.opener().need(need).open(uri).await?)
    }

    /// The same for a command that needs only these tensors, where it does not need all.
    pub(crate) async fn open_for(
        &self,
        uri: &str,
        need: Need,
        keys: Option<WantedKeys>,
    ) -> Result<Checkpoint, Failure> {
        match keys {
            Some(keys) => Ok(self.opener().need(need).open_keys(uri, keys).await?),
            None => self.open(uri, need).await,
        }
    }

    /// Opens several.
    pub(crate) async fn open_all(
        &self,
        uris: &[String],
        need: Need,
        keys: Option<WantedKeys>,
    ) -> Result<Vec<Checkpoint>, Failure> {
        let mut all = Vec::with_capacity(uris.len());
        for uri in uris {
            all.push(self.open_for(uri, need, keys.clone()).await?);
        }
        Ok(all)
    }

    /// Runs the work of a command, as [`interrupt::run`] does.
    pub(crate) fn run<T>(
        &self,
        long: bool,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        interrupt::run(long, &self.rollback, self.group.as_ref(), work)
    }

    /// Notes which of two checkpoints in one folder is opened.
    pub(crate) async fn note_ambiguity(&self, uri: &str) -> Result<(), Failure> {
        if let Some(note) = self.opener.ambiguity(uri).await? {
            self.out.note(&note);
        }
        Ok(())
    }
}

fn storages(global: &Global, plugins: &Plugins) -> StorageRegistry {
    let mut storages =
        if global.follow_links { dcp::storages_following_links() } else { dcp::default_storages() };
    plugins.register(&mut storages);
    let options = global.storage_options.iter().map(|option| (&option.name, &option.value));
    let storages = storages.options(options.collect());
    #[cfg(test)]
    let storages = storages.layer(crate::every_operation::faulty);
    storages
}
