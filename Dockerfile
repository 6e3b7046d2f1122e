# docker build -t nanoladder .                          for a CPU; a corpus is prepared, and the tests' packages are absent
# docker build -t nanoladder --build-arg TORCH=cu130 .  for NVIDIA GPUs: the driver's CUDA version, as at pytorch.org
# docker run --rm -it --shm-size=1g -v "$PWD/out:/nanoladder/out" nanoladder python train.py config/quickstart.py
FROM python:3.13-slim
ARG TORCH=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /nanoladder
COPY requirements.txt .
RUN pip install --no-cache-dir "$(grep ^torch== requirements.txt)" --index-url "https://download.pytorch.org/whl/$TORCH" \
    && pip install --no-cache-dir -r requirements.txt
COPY . .
RUN python data/python_stdlib/prepare.py
CMD ["python", "train.py", "config/quickstart.py"]
