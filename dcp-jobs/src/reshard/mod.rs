//! Writing a checkpoint for other ranks.

use dcp_core::format::Compression;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::chosen_keys::{Keys, unmatched_in};
use crate::checkpoint::format::{Format, Shape};
use crate::checkpoint::framework::{Concern, Preparation};
use crate::checkpoint::overlap_guard::keep_apart;
use crate::checkpoint::refuse_incomplete::refuse_incomplete;
use crate::checkpoint::setters::{destination_options, job_options};
use crate::checkpoint::whole::Whole;
use crate::convert::Written;
use crate::convert::destination::{Destination, SourceFacts};
use crate::error::{Error, ErrorKind};
use crate::keys::StatePart;
use crate::options::JobOptions;
use crate::place::same_place::same_sources;

pub use crate::write::division::{Division, Held, Owner};
pub use crate::write::reshard::{MAX_RANKS, divide, reshard};

impl Checkpoint {
    /// Rewrites this checkpoint in the directory `target` as if other ranks had saved it. One of a
    /// format that equal ranks cannot write becomes a checkpoint of PyTorch's.
    ///
    /// ```no_run
    /// # use dcp_jobs::{Checkpoint, Error};
    /// # async fn example(pytorch: Checkpoint) -> Result<(), Error> {
    /// pytorch.reshard("resharded").ranks(8).run().await?;
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
}

impl Resharding<'_> {
    job_options!();
    destination_options!();

    /// Writes for this number of equal ranks. A checkpoint of a framework that divides tensors by rules of its
    /// own has a layout among the options of the framework instead.
    pub fn ranks(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.ranks = ranks.into();
        self
    }

    /// Compresses the data.
    pub fn compression(mut self, compression: impl Into<Option<Compression>>) -> Self {
        self.destination = self.destination.compression(compression);
        self
    }

    /// The destination, of the format of the source.
    fn destination(&self) -> Result<Destination, Error> {
        let (destination, uri) = (self.destination.clone(), &self.checkpoint.uri);
        let of = self.checkpoint.framework.as_ref();
        let target = of.and_then(|of| Some((of.framework.title(), of.framework.target()?)));
        let layout = self.destination.options().given().find_map(|(options, option)| {
            matches!(options.concern(), Concern::Target(_)).then_some(option)
        });
        match (self.ranks, target) {
            (None, Some((_, target))) => Ok(destination.to(Format::Registered(target.name()))),
            (None, None) => {
                let message = format!(
                    "{} divides checkpoints of a framework, and {uri:?} is none",
                    layout.unwrap_or("a layout"),
                );
                let targets = self.checkpoint.opener.frameworks.targets();
                let hint =
                    targets.fold("say `Destination::ranks`".to_owned(), |hint, (_, target)| {
                        format!(
                            "{hint}, or `Checkpoint::convert` to {} with `MappingOptions::arch` \
                             to make it one",
                            target.name()
                        )
                    });
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint))
            }
            (Some(_), Some((title, _))) => {
                let message = format!(
                    "{uri:?} is a checkpoint of {title}, which equal ranks of PyTorch would not leave it"
                );
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint(
                    "choose another layout by the options of the framework; \
                     `Checkpoint::convert` to dcp, with `Destination::ranks`, makes it a \
                     checkpoint of PyTorch",
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
    /// and those of [`Conversion::run`](crate::convert::Conversion::run).
    pub async fn run(self) -> Result<Written, Error> {
        let selection = self.keys.selection(StatePart::Everything);
        self.destination.refuse_idle_options(&self.checkpoint.opener, false)?;
        let mut notes = self.checkpoint.opener.notes();
        let checkpoint = match self.destination.options().given_of_optimizer() {
            Some(_) => Whole::of(self.checkpoint).await?,
            None => Whole::of_keys(self.checkpoint, &selection.needed()).await?,
        };
        let work = self.destination.work("reshard", &checkpoint, &self.job).await?;
        let work = work.option("keys", &selection);
        let work = work.option("`Destination::ranks`", &self.ranks);
        same_sources(&self.job, work, &[&checkpoint]).await?;
        keep_apart(&checkpoint, self.destination.uri(), Shape::Folder).await?;
        let (destination, job) = (self.destination()?, &self.job);
        refuse_incomplete(&checkpoint, selection.part, job, &mut notes).await?;
        let format = destination.format()?;
        let options = destination.options();
        let mut request =
            Preparation { options, selection: &selection, format, job, notes: &mut notes };
        let opener = &checkpoint.opener;
        let all = opener.frameworks.prepare(&checkpoint, &mut request).await?;
        let unmatched = unmatched_in(&selection, [&all]).await?;
        let source = selection.apply(&all, job).await?;
        let how = SourceFacts {
            layout: destination.layout(format, &checkpoint).await?,
            object: destination.required_object(format, opener, &all, &selection).await?,
            ..SourceFacts::default()
        };
        let mut report = destination.write(&source, &checkpoint, how, job).await?;
        report.unmatched = unmatched;
        Ok(Written { report, mapping: None, notes: notes.into_said() })
    }
}
