#![doc = include_str!("../../../../PLUGINS.md")]
