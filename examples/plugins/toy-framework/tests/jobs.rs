//! Jobs call a framework of another project as they call ours.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_jobs::framework::Frameworks;
use dcp_jobs::run::StepNaming;
use dcp_jobs::{Destination, ErrorKind, Format, Opener};
use dcp_storage_fs::FsStorage;
use toy_format::ToyFormat;
use toy_framework::{TOY_RANKS, Toy, ToyDescription, ToyRanks};

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    let frameworks = Frameworks::none().with(Arc::new(Toy));
    Opener::new(storages).format(Arc::new(ToyFormat)).frameworks(frameworks)
}

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fixtures/pytorch/t21_plain");

#[tokio::test]
async fn a_framework_describes_verifies_and_writes_its_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let source = opener().open(FIXTURE).await.unwrap();
    assert_eq!(source.framework(), None);

    // Its target, with its own option.
    let tensors = dcp_jobs::Keys::all().include("*.weight");
    let target = Destination::new(at("four")).to(TOY_RANKS).with(ToyRanks(4));
    source.convert(target).keys(tensors).run().await.unwrap();
    let four = opener().open(&at("four")).await.unwrap();
    assert_eq!(four.framework(), Some("toy"));
    let inspected = four.inspect().run().await.unwrap();
    let described = inspected.framework.unwrap();
    let files = four.source().metadata().await.unwrap().files().len();
    assert_eq!(described.get(), Some(&ToyDescription { files }));
    assert!(files > 1, "{files}");
    let report = four.verify().deep(true).run().await.unwrap();
    assert!(report.ok, "{:?}", report.problems);

    // Another layout, as the framework divides it, and none of another kind.
    four.reshard(at("one")).with(ToyRanks(1)).run().await.unwrap();
    let one = opener().open(&at("one")).await.unwrap();
    assert_eq!(one.source().metadata().await.unwrap().files().len(), 1);
    let error = four.reshard(at("equal")).ranks(2).run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    let dcp = Destination::new(at("dcp")).to(Format::Dcp).with(ToyRanks(2));
    let error = four.convert(dcp).run().await.unwrap_err();
    assert!(error.to_string().starts_with("`ToyRanks` is for toy-ranks"), "{error}");
    assert!(!folder.path().join("dcp").exists());
    let ranks = Destination::new(at("ranks")).to(TOY_RANKS).ranks(2);
    let error = four.convert(ranks).run().await.unwrap_err();
    assert!(error.to_string().starts_with("`Destination::ranks` is for dcp"), "{error}");

    // A program without the framework opens the format, and does not know the target.
    let plain = opener().frameworks(Frameworks::none()).open(&at("four")).await.unwrap();
    assert_eq!(plain.framework(), None);
    let unknown = || Destination::new(at("unknown")).to(TOY_RANKS);
    let error = plain.convert(unknown()).run().await.unwrap_err();
    assert!(error.to_string().contains("is not one of the opener's formats"), "{error}");
    let error = plain.convert(unknown().with(ToyRanks(2))).run().await.unwrap_err();
    assert!(error.to_string().contains("is no plug-in of this program"), "{error}");
}

#[tokio::test]
async fn a_save_is_noted_in_the_tracker_of_the_framework() {
    let folder = tempfile::tempdir().unwrap();
    let run = opener().run(folder.path().display().to_string());
    run.note_save(StepNaming::Underscore, 7, &BTreeMap::new()).await.unwrap();
    let tracker = folder.path().join("latest.toy");
    assert_eq!(std::fs::read_to_string(&tracker).unwrap(), "7");
    run.note_save(StepNaming::Dash, 8, &BTreeMap::new()).await.unwrap();
    assert_eq!(std::fs::read_to_string(&tracker).unwrap(), "7");
}
