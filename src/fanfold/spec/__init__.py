"""Nouns: frozen values, checked when made; no tensor is computed here."""

from fanfold.spec.activation import Activation as Activation
from fanfold.spec.adapters import AdapterRows as AdapterRows
from fanfold.spec.adapters import AdapterTable as AdapterTable
from fanfold.spec.adapters import AdapterWork as AdapterWork
from fanfold.spec.lora import LoraPair as LoraPair
from fanfold.spec.route import Route as Route
from fanfold.spec.router import Router as Router
from fanfold.spec.shape import ExpertShape as ExpertShape
from fanfold.spec.weight_format import WeightFormat as WeightFormat
from fanfold.spec.weights import ExpertWeights as ExpertWeights
from fanfold.spec.weights import ProjectionWeights as ProjectionWeights
from fanfold.spec.work import Blocks as Blocks
from fanfold.spec.work import WorkList as WorkList
