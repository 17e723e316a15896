//! Openers without a network.

use super::*;

fn open(url: &str, options: StorageOptions) -> Result<ObjectStorage, StorageError> {
    let request = OpenRequest::new(url, Access::Write).with_options(options);
    ObjectOpener::new().open_now(&request)
}

/// Secrets are in no error and in no text of a storage.
#[test]
fn urls_with_secrets_are_refused_without_showing_them() {
    for url in [
        "s3://user:5ec7e7@bucket/run",
        "s3://bucket/run?X-Amz-Signature=5ec7e7",
        "gs://bucket/run?token=5ec7e7",
        "az://user:5ec7e7@account/run",
        "az://container/run?sig=5ec7e7",
        "memory://a?5ec7e7",
        "unknown://user:5ec7e7@x/",
    ] {
        let error = open(url, StorageOptions::new()).unwrap_err();
        let shown = format!("{error:?} {}", dcp_core::error::error_chain(&error));
        assert!(!shown.contains("5ec7e7"), "{shown}");
    }
}

#[cfg(feature = "memory")]
#[tokio::test]
async fn a_url_names_the_same_memory_in_every_registry() {
    use dcp_core::storage::{PutMode, StorageExt};
    let mut storages = StorageRegistry::empty();
    register(&mut storages);
    let key = dcp_core::Key::new("a").unwrap();
    let written = storages.open("memory://x/run", Access::Write).await.unwrap();
    written.put(&key, "1".into(), PutMode::Create).await.unwrap();
    let mut storages = StorageRegistry::empty();
    register(&mut storages);
    let read = storages.open("memory://x/", Access::Read).await.unwrap();
    let bytes = read.read_range(&dcp_core::Key::new("run/a").unwrap(), 0..1).await.unwrap();
    assert_eq!(bytes, "1");
    assert!(!read.capabilities().writable);
    assert_eq!(read.delete(&[key]).await.unwrap_err().kind(), Kind::Unsupported);
    let other = storages.open("memory://y/run", Access::Read).await.unwrap();
    assert!(!other.contains(&dcp_core::Key::new("a").unwrap()).await.unwrap());
}

#[cfg(feature = "s3")]
#[test]
fn settings_are_not_shown() {
    let options = StorageOptions::new()
        .with("aws_secret_access_key", "5ec7e7")
        .with("aws_access_key_id", "name")
        .with("aws_endpoint", "http://user:5ec7e7@127.0.0.1:1");
    let opener = ObjectOpener::new();
    let request = OpenRequest::new("s3://bucket/run", Access::Read).with_options(options);
    let storage = opener.open_now(&request).unwrap();
    let shown = format!("{storage:?} {opener:?} {request:?}");
    assert!(!shown.contains("5ec7e7"), "{shown}");
}

#[cfg(feature = "s3")]
#[test]
fn one_bucket_and_settings_have_one_client() {
    let opener = ObjectOpener::new();
    let open = |url: &str, region: &str| {
        // Not those of a profile of whoever runs the test.
        let options = StorageOptions::new().with("aws_region", region);
        let options = options.with("aws_access_key_id", "x").with("aws_secret_access_key", "x");
        opener.open_now(&OpenRequest::new(url, Access::Read).with_options(options)).unwrap()
    };
    let one = open("s3://bucket/a", "x");
    let same = open("s3a://bucket/b", "x");
    let other = open("s3://bucket/a", "y");
    assert!(Arc::ptr_eq(&one.0.store, &same.0.store));
    assert!(!Arc::ptr_eq(&one.0.store, &other.0.store));
}

#[cfg(feature = "s3")]
#[test]
fn urls_of_one_bucket_are_one_place() {
    let locate = |url| locate(url).unwrap();
    assert_eq!(locate("s3://bucket/a/b/"), locate("s3a://bucket/a/b"));
    assert!(locate("s3://bucket/a/b").is_in(&locate("s3://bucket/a")));
    assert!(!locate("s3://other/a/b").is_in(&locate("s3://bucket/a")));
}

/// Whatever the URL: a job that reads from a disk may have a setting for where it writes.
#[cfg(feature = "memory")]
#[tokio::test]
async fn a_setting_that_nobody_knows_is_refused_without_its_value() {
    let mut storages = StorageRegistry::empty();
    register(&mut storages);
    storages.register("file", |_| Err(invalid("opened")));
    let with = |name: &str| storages.clone().options(StorageOptions::new().with(name, "5ec7e7"));
    for url in ["/plain/path", "memory://x"] {
        let error = with("coalesce_gab").open(url, Access::Read).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        let text = format!("{error:?} {error}");
        assert!(text.contains("coalesce_gap") && !text.contains("5ec7e7"), "{text}");
    }
    let error = with("part_bytes").open("/plain/path", Access::Read).await.unwrap_err();
    assert!(error.to_string().contains("opened"), "{error}");
    // Those of another crate.
    storages.register_options(|name| if name == "tape_drive" { Ok(()) } else { Err(vec![]) });
    let tape = storages.clone().options(StorageOptions::new().with("tape_drive", "1"));
    tape.open("memory://x", Access::Read).await.unwrap();
}
