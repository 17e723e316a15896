//! Writing a checkpoint for other ranks.

use dcp_convert::JobOptions;
use dcp_convert::keys::StatePart;
use dcp_core::format::Compression;
use dcp_olmo::OptimizerLayout;

use crate::checkpoint::Checkpoint;
use crate::convert::{Written, with_layout};
use crate::destination::{Destination, SourceFacts};
use crate::error::{Error, ErrorKind};
use crate::format::Format;
use crate::keys::{Keys, unmatched_in};
use crate::megatron_target::{MegatronTarget, common_state};
use crate::optimizer::OptimizerOptions;
use crate::overlap_guard::{Shape, keep_apart};
use crate::refuse_incomplete::refuse_incomplete;
use crate::same_place::same_sources;
use crate::setters::{destination_options, job_options};
use crate::whole::Whole;

impl Checkpoint {
    /// Rewrites this checkpoint in the directory `target` as if other ranks had saved it. One of a
    /// format that equal ranks cannot write becomes a checkpoint of PyTorch's.
    ///
    /// ```no_run
    /// # use dcp_checkpoint::{Checkpoint, Error, MegatronTarget};
    /// # async fn example(pytorch: Checkpoint, megatron: Checkpoint) -> Result<(), Error> {
    /// pytorch.reshard("resharded").ranks(8).run().await?;
    /// megatron.reshard("resharded").megatron(MegatronTarget::new().tp(4).pp(2)).run().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reshard(&self, target: impl Into<String>) -> Resharding<'_> {
        Resharding {
            checkpoint: self,
            destination: Destination::new(target),
            ranks: None,
            keys: Keys::all(),
            job: JobOptions::default(),
            optimizer: OptimizerOptions::default(),
            optimizer_layout: None,
        }
    }
}

/// A reshard to [`run`](Self::run), from [`Checkpoint::reshard`].
#[derive(Debug)]
#[must_use = "a reshard does nothing before `run`"]
pub struct Resharding<'a> {
    checkpoint: &'a Checkpoint,
    destination: Destination,
    ranks: Option<u32>,
    keys: Keys,
    job: JobOptions,
    optimizer: OptimizerOptions,
    optimizer_layout: Option<OptimizerLayout>,
}

impl Resharding<'_> {
    job_options!();
    destination_options!();

    /// Writes for this number of equal ranks. For a checkpoint of any format but Megatron-Core's.
    pub fn ranks(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.ranks = ranks.into();
        self
    }

    /// Writes for this layout. For a checkpoint of Megatron-Core.
    pub fn megatron(mut self, layout: MegatronTarget) -> Self {
        self.destination = self.destination.megatron(layout);
        self
    }

    /// Compresses the data.
    pub fn compression(mut self, compression: impl Into<Option<Compression>>) -> Self {
        self.destination = self.destination.compression(compression);
        self
    }

    /// The treatment of Megatron-Core's optimizer state.
    pub fn optimizer(mut self, optimizer: OptimizerOptions) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Divides the optimizer's state as OLMo-core does.
    pub fn optimizer_layout(mut self, layout: impl Into<Option<OptimizerLayout>>) -> Self {
        self.optimizer_layout = layout.into();
        self
    }

    /// The destination, of the format of the source.
    fn destination(&self) -> Result<Destination, Error> {
        let (destination, uri) = (self.destination.clone(), &self.checkpoint.uri);
        match (self.ranks, &self.checkpoint.megatron) {
            (None, Some(_)) => Ok(destination.to(Format::TorchDist)),
            (None, None) => {
                let message = format!(
                    "{} is for checkpoints of Megatron-Core, and {uri:?} is none",
                    destination.megatron.given().unwrap_or("a layout"),
                );
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint(
                    "say --ranks, or `dcp convert --to torch-dist --arch` to make it one",
                ))
            }
            (Some(_), Some(_)) => {
                let message = format!(
                    "{uri:?} is a checkpoint of Megatron-Core, which equal ranks of PyTorch would \
                     not leave it"
                );
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint(
                    "say --tp, --pp and --ep for another layout of Megatron-Core; `dcp convert \
                     --to dcp --ranks N` makes it a checkpoint of PyTorch",
                ))
            }
            (Some(ranks), None) => {
                let info = self.checkpoint.format;
                let registered = self.checkpoint.opener.formats.by_name(info.name);
                let is_target = registered.is_some_and(|format| format.target().is_some());
                let format = if is_target { Format::of_registered(info.name) } else { Format::Dcp };
                Ok(destination.to(format).ranks(ranks))
            }
        }
    }

    /// Rewrites the checkpoint.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for ranks that the checkpoint does not go with,
    /// and those of [`Conversion::run`](crate::jobs::Conversion::run).
    pub async fn run(self) -> Result<Written, Error> {
        let selection = self.keys.selection(StatePart::Everything);
        let mut notes = self.checkpoint.opener.notes();
        let checkpoint = match self.optimizer_layout {
            Some(_) => Whole::of(self.checkpoint).await?,
            None => Whole::of_keys(self.checkpoint, &selection.needed()).await?,
        };
        let work = self.destination.work("reshard", &checkpoint, &self.job).await?;
        let work = work.option("keys", &selection);
        let work = work.option("--ranks", &self.ranks);
        let work = work.option("optimizer", &(self.optimizer, self.optimizer_layout));
        same_sources(&self.job, work, &[&checkpoint]).await?;
        keep_apart(&checkpoint, self.destination.uri(), Shape::Folder).await?;
        let (destination, job) = (self.destination()?, &self.job);
        refuse_incomplete(&checkpoint, selection.part, job, &mut notes).await?;
        let all = self.optimizer.apply(&checkpoint, &selection, job, &mut notes).await?;
        let all = with_layout(all, self.optimizer_layout, job).await?;
        let unmatched = unmatched_in(&selection, [&all]).await?;
        let source = selection.apply(&all, job).await?;
        let mut how = SourceFacts::default();
        if checkpoint.megatron.is_some() {
            how.layout = Some(destination.megatron.layout(&checkpoint).await?);
            how.common = common_state(&all, &selection).await?;
        }
        let mut report = destination.write(&source, &checkpoint, how, job).await?;
        report.unmatched = unmatched;
        Ok(Written { report, mapping: None, notes: notes.into_said() })
    }
}
