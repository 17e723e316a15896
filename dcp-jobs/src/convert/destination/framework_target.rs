//! Destinations that are targets of frameworks.

use dcp_core::Value;
use dcp_core::format::CheckpointTarget;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Format;
use crate::checkpoint::framework::{Concern, FrameworkTarget, TargetLayout, refuse_idle_config};
use crate::checkpoint::opener::Opener;
use crate::error::{Error, ErrorKind};
use crate::keys::StatePart;
use crate::keys::select::Selection;
use crate::read::read_object;
use crate::source::Source;

use super::Destination;

impl Destination {
    /// Refuses options that the job does not pass on: those that no plug-in of the opener takes, and, in a job
    /// that gives no tensor another name, those about names.
    pub(crate) fn refuse_idle_options(&self, opener: &Opener, renames: bool) -> Result<(), Error> {
        for (options, option) in self.options.given() {
            let message = match options.concern() {
                _ if !opener.frameworks.has(options.taken_by()) => format!(
                    "{option} is for {:?}, which is no plug-in of this program",
                    options.taken_by()
                ),
                Concern::Names if !renames => {
                    format!("{option} gives tensors other names, and this job keeps them")
                }
                _ => continue,
            };
            let error = Error::new(ErrorKind::InvalidOption, message);
            return Err(error.with_hint("leave it out, or use `Checkpoint::convert`"));
        }
        Ok(())
    }

    /// Refuses a folder with a configuration, in a job that applies no mapping.
    pub(crate) fn refuse_idle_config(&self, format: Format) -> Result<(), Error> {
        refuse_idle_config(format, self.config.as_deref())
    }

    /// The target of a framework that a format is, with the name of the framework's format.
    pub(crate) fn framework_target<'a>(
        &self,
        opener: &'a Opener,
        format: Format,
    ) -> Option<(&'static str, &'a dyn FrameworkTarget)> {
        match format {
            Format::Registered(name) => opener.frameworks.target(name),
            _ => None,
        }
    }

    /// The division of a target of a framework; `None` of other formats.
    pub(crate) async fn layout(
        &self,
        format: Format,
        source: &Checkpoint,
    ) -> Result<Option<Box<dyn TargetLayout>>, Error> {
        match self.framework_target(&source.opener, format) {
            Some(_) if self.ranks.is_some() => {
                Err(self.is_for("`Destination::ranks`", Format::Dcp, format))
            }
            Some((_, target)) => Ok(Some(target.layout(source, &self.options).await?)),
            None => Ok(None),
        }
    }

    /// The object that a framework needs, where the choice of keys neither takes nor excludes it.
    pub(crate) async fn required_object(
        &self,
        format: Format,
        opener: &Opener,
        source: &Source,
        selection: &Selection,
    ) -> Result<Option<Value>, Error> {
        let target = self.framework_target(opener, format);
        let Some(key) = target.and_then(|(_, target)| target.required_object()) else {
            return Ok(None);
        };
        let taken = selection.include.selects(key, None) && selection.part != StatePart::Model;
        let excluded = selection.exclude.as_ref().is_some_and(|e| e.selects(key, None))
            || selection.mapping.contains_key(key);
        if taken || excluded || source.metadata().await?.get(key).is_none() {
            return Ok(None);
        }
        Ok(Some(read_object(source, key).await?))
    }

    /// Refuses numbers of ranks for tensors that a framework does not divide among ranks, because their names
    /// are none of its own.
    pub(crate) async fn refuse_idle_sizes(
        &self,
        format: Format,
        checkpoint: &Checkpoint,
        layout: &dyn TargetLayout,
        is_named: bool,
        source: &Source,
    ) -> Result<(), Error> {
        let Some(option) = layout.divides() else { return Ok(()) };
        let target = self.framework_target(&checkpoint.opener, format);
        let Some((framework, target)) = target else { return Ok(()) };
        let is_own = checkpoint.framework() == Some(framework);
        if is_named || is_own || target.has_own_names(&*source.metadata().await?) {
            return Ok(());
        }
        let message = format!("{option} divides tensors of {format}, and none has a name of those");
        let hint =
            "leave it out, or give a Hugging Face model the names with `MappingOptions::arch`";
        Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint))
    }

    /// The writer of a format, by the opener's frameworks and formats.
    pub(super) fn target_of<'a>(
        &self,
        opener: &'a Opener,
        format: Format,
    ) -> Result<&'a dyn CheckpointTarget, Error> {
        let framework = self.framework_target(opener, format).map(|(name, _)| name);
        let registered = framework.or_else(|| format.registered());
        let registered = registered.and_then(|name| opener.formats.by_name(name));
        registered.and_then(|format| format.target()).ok_or_else(|| {
            let problem = match registered {
                Some(_) => "can only be read",
                None => "is not one of the opener's formats",
            };
            Error::new(ErrorKind::InvalidOption, format!("the format {format} {problem}"))
        })
    }
}
