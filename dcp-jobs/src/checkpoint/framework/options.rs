//! Options of plug-ins, by their types.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;

use crate::checkpoint::Checkpoint;

/// The subject of an option of a framework, by which jobs decide whether it applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Concern {
    /// The state of the optimizer, which a job may leave out.
    Optimizer,
    /// The names and shapes of tensors.
    Names,
    /// The target of this name.
    Target(&'static str),
}

/// Options of a framework or of a mapping of names, which a job passes on to it.
pub trait FrameworkOptions: Any + fmt::Debug + Send + Sync {
    /// The name of the framework or of the mapping that takes the options. A job refuses options that no plug-in
    /// of its opener takes.
    fn taken_by(&self) -> &'static str;

    /// The part of a job that the options are about.
    fn concern(&self) -> Concern;

    /// The subject of the options, for the message to ranks that disagree about it.
    fn subject(&self) -> &'static str;

    /// The first of the options that is not the default, by its setter in backticks, as messages name it.
    fn given(&self) -> Option<&'static str>;

    /// The checkpoints that the job reads for the options beside its own, which no target may touch.
    fn sources(&self) -> Vec<&Checkpoint> {
        Vec::new()
    }
}

/// The options of plug-ins in a job: at most one value of each type.
///
/// ```
/// use dcp_jobs::framework::{Concern, FrameworkOptions, Options};
///
/// #[derive(Debug)]
/// struct Shards(u32);
///
/// impl FrameworkOptions for Shards {
///     fn taken_by(&self) -> &'static str {
///         "toy"
///     }
///     fn concern(&self) -> Concern {
///         Concern::Target("toy")
///     }
///     fn subject(&self) -> &'static str {
///         "the shards"
///     }
///     fn given(&self) -> Option<&'static str> {
///         Some("`Shards`")
///     }
/// }
///
/// let options = Options::default().with(Shards(2)).with(Shards(4));
/// assert_eq!(options.get::<Shards>().map(|shards| shards.0), Some(4));
/// ```
#[derive(Clone, Default)]
pub struct Options(Vec<(TypeId, Arc<dyn FrameworkOptions>)>);

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Options {
    /// Sets the options of this type, in place of earlier ones.
    #[must_use]
    pub fn with<T: FrameworkOptions>(mut self, options: T) -> Self {
        self.set(options);
        self
    }

    /// Sets the options of this type, in place of earlier ones.
    pub(crate) fn set<T: FrameworkOptions>(&mut self, options: T) {
        let id = TypeId::of::<T>();
        self.0.retain(|(there, _)| *there != id);
        self.0.push((id, Arc::new(options)));
    }

    /// The options of this type.
    #[must_use]
    pub fn get<T: FrameworkOptions>(&self) -> Option<&T> {
        let (_, options) = self.0.iter().find(|(there, _)| *there == TypeId::of::<T>())?;
        let options: &dyn Any = &**options;
        options.downcast_ref()
    }

    /// All of them, in the order in which they were set.
    pub fn iter(&self) -> impl Iterator<Item = &dyn FrameworkOptions> {
        self.0.iter().map(|(_, options)| &**options)
    }

    /// The options that are not all defaults, each with the first one that is not.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&dyn FrameworkOptions, &'static str)> {
        self.iter().filter_map(|options| Some((options, options.given()?)))
    }

    /// The first option about the optimizer that is not the default.
    pub(crate) fn given_of_optimizer(&self) -> Option<&'static str> {
        let mut given = self.given().filter(|(options, _)| options.concern() == Concern::Optimizer);
        given.next().map(|(_, option)| option)
    }
}
