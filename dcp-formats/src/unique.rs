//! JSON objects with unique names.

use std::fmt;
use std::marker::PhantomData;

use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// A JSON object in file order. A duplicate name is an error: readers disagree on which value
/// counts, so the file is either damaged or built to deceive.
#[derive(Debug)]
pub struct UniqueMap<V>(pub IndexMap<String, V>);

impl<V> Default for UniqueMap<V> {
    fn default() -> Self {
        Self(IndexMap::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
                let mut entries = IndexMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let value = map.next_value()?;
                    if entries.contains_key(&name) {
                        return Err(A::Error::custom(format!("{name:?} occurs twice")));
                    }
                    entries.insert(name, value);
                }
                Ok(UniqueMap(entries))
            }
        }

        deserializer.deserialize_map(Entries(PhantomData))
    }
}
