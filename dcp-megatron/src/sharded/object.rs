//! Sharded objects, such as the random states of ranks.

use std::fmt;
use std::sync::Arc;

use dcp_core::{Dims, Value};

use super::error::ShardError;
use super::replica::ReplicaId;

/// One object of a grid of them. Its grid cannot be changed by loading: the number of objects is
/// part of the name.
#[derive(Clone, Debug)]
pub struct ShardedObject {
    at: ObjectKey,
    replica_id: ReplicaId,
    data: Option<Value>,
}

/// The name of one object of a grid: `key/shard_<offsets>_<shape of the grid>`, the numbers of
/// each joined by dots.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    key: Arc<str>,
    offset: Dims,
    grid: Dims,
}

impl ObjectKey {
    /// Object `offset` of a grid of `grid` objects under `key`.
    ///
    /// # Errors
    ///
    /// When the lists differ in length or the grid has no axis or no such place, and when the key
    /// has a slash: Megatron-Core could not read the name back.
    pub fn new(
        key: impl Into<Arc<str>>,
        grid: impl Into<Dims>,
        offset: impl Into<Dims>,
    ) -> Result<Self, ShardError> {
        let (key, grid, offset) = (key.into(), grid.into(), offset.into());
        let refuse = |problem: String| ShardError::Object { key: key.to_string(), problem };
        if grid.ndim() != offset.ndim() {
            return Err(refuse(format!("offset {offset} in a grid of {grid}")));
        }
        if grid.ndim() == 0 {
            let problem = "its grid needs at least one axis; that of a single object is [1]";
            return Err(refuse(problem.to_owned()));
        }
        if offset.iter().zip(&*grid).any(|(at, len)| at >= len) {
            return Err(refuse(format!("a grid of {grid} has no place {offset}")));
        }
        Self { key: "".into(), offset, grid }.renamed(key)
    }

    /// Replaces the key of a place that was read, or checked before.
    fn renamed(self, key: Arc<str>) -> Result<Self, ShardError> {
        if key.contains('/') {
            let problem = "it has a slash, which divides key and place".to_owned();
            return Err(ShardError::Object { key: key.to_string(), problem });
        }
        Ok(Self { key, ..self })
    }

    /// Sets the length of the grid's last axis, which an older name does not have.
    pub(crate) fn with_last_axis(mut self, len: u64) -> Self {
        if let Some(last) = self.grid.last_mut() {
            *last = len;
        }
        self
    }

    /// The object that a stored entry is named after, if it is one: also in the older form of one
    /// offset more than the grid has axes, whose last axis is unknown and becomes 0.
    #[must_use]
    pub fn parse(unique_key: &str) -> Option<Self> {
        let (key, place) = unique_key.split_once('/')?;
        let (offset, grid) = place.strip_prefix("shard_")?.split_once('_')?;
        let (offset, mut grid) = (numbers(offset)?, numbers(grid)?);
        if offset.ndim() == grid.ndim() + 1 {
            grid = grid.iter().copied().chain([0]).collect();
        }
        (offset.ndim() == grid.ndim()).then(|| Self { key: key.into(), offset, grid })
    }

    /// The name without the place.
    #[must_use]
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// Returns the object's position in the grid.
    #[must_use]
    pub fn offset(&self) -> &Dims {
        &self.offset
    }

    /// Returns the number of objects along each axis; 0 on the last where an older name does not
    /// have it.
    #[must_use]
    pub fn grid(&self) -> &Dims {
        &self.grid
    }
}

impl fmt::Display for ObjectKey {
    /// The unique key under which the object is stored.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined =
            |numbers: &Dims| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(".");
        write!(f, "{}/shard_{}_{}", self.key, joined(&self.offset), joined(&self.grid))
    }
}

fn numbers(text: &str) -> Option<Dims> {
    if text.is_empty() {
        return Some(Dims::default());
    }
    let parts = text.split('.').map(|part| {
        // `parse` alone would take a sign.
        part.bytes().all(|b| b.is_ascii_digit()).then(|| part.parse().ok())?
    });
    parts.take(Dims::MAX_AXES + 1).collect::<Option<Dims>>().filter(|n| n.ndim() <= Dims::MAX_AXES)
}

impl ShardedObject {
    /// Object `offset` of a grid of `grid` objects under `key`, to be saved.
    ///
    /// # Errors
    ///
    /// As [`ObjectKey::new`].
    pub fn new(
        key: impl Into<Arc<str>>,
        data: impl Into<Value>,
        grid: impl Into<Dims>,
        offset: impl Into<Dims>,
    ) -> Result<Self, ShardError> {
        let at = ObjectKey::new(key, grid, offset)?;
        Ok(Self { at, replica_id: ReplicaId::MAIN, data: Some(data.into()) })
    }

    /// The only object under `key`.
    ///
    /// # Errors
    ///
    /// As [`ObjectKey::new`].
    pub fn single(key: impl Into<Arc<str>>, data: impl Into<Value>) -> Result<Self, ShardError> {
        Self::new(key, data, [1], [0])
    }

    /// An object that is to be loaded.
    #[must_use]
    pub fn request(at: ObjectKey) -> Self {
        Self { at, replica_id: ReplicaId::MAIN, data: None }
    }

    /// Sets the identifier of the object's replica; the main one by default.
    #[must_use]
    pub fn with_replica_id(mut self, replica_id: impl Into<ReplicaId>) -> Self {
        self.replica_id = replica_id.into();
        self
    }

    /// Replaces the key.
    ///
    /// # Errors
    ///
    /// When the key has a slash.
    pub fn with_key(mut self, key: impl Into<Arc<str>>) -> Result<Self, ShardError> {
        self.at = self.at.renamed(key.into())?;
        Ok(self)
    }

    /// Removes the data.
    #[must_use]
    pub fn without_data(mut self) -> Self {
        self.data = None;
        self
    }

    /// Its name and place.
    #[must_use]
    pub fn at(&self) -> &ObjectKey {
        &self.at
    }

    /// The name without the place.
    #[must_use]
    pub fn key(&self) -> &Arc<str> {
        self.at.key()
    }

    /// The name under which it is stored.
    #[must_use]
    pub fn unique_key(&self) -> String {
        self.at.to_string()
    }

    /// Returns the identifier of the object's replica.
    #[must_use]
    pub fn replica_id(&self) -> &ReplicaId {
        &self.replica_id
    }

    /// The value.
    #[must_use]
    pub fn data(&self) -> Option<&Value> {
        self.data.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_keys_come_back() {
        let key = ObjectKey::new("rng_state", [1, 2], [0, 1]).unwrap();
        assert_eq!(key.to_string(), "rng_state/shard_0.1_1.2");
        assert_eq!(ObjectKey::parse("rng_state/shard_0.1_1.2"), Some(key));
        let legacy = ObjectKey::parse("optimizer/shard_3.7_24").unwrap();
        assert_eq!((legacy.offset(), legacy.grid()), (&[3, 7].into(), &[24, 0].into()));
        let unsharded = ObjectKey::parse("x/shard__").unwrap();
        assert_eq!(unsharded.to_string(), "x/shard__");
        for other in [
            "a",
            "a/b",
            "a/shard_1",
            "a/shard_+1_2",
            "a/shard_1_x",
            "a/shard_1_2.3",
            "a/b/shard_0_1",
        ] {
            assert_eq!(ObjectKey::parse(other), None, "{other}");
        }
        let many = format!("a/shard_{}_1", vec!["0"; 65].join("."));
        assert_eq!(ObjectKey::parse(&many), None);
    }

    #[test]
    fn keys_that_could_not_be_read_back_are_refused() {
        assert!(ShardedObject::single("a/b", 1).is_err());
        assert!(ShardedObject::new("a", 1, [2, 2], [1]).is_err());
        let object = ShardedObject::single("a", 1).unwrap();
        assert!(object.clone().with_key("b/c").is_err());
        assert_eq!(object.unique_key(), "a/shard_0_1");
    }
}
